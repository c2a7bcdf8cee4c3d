"""Start the ranks of one machine, and watch over ranks while they work."""
