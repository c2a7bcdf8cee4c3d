"""Start the ranks of one machine, and watch ranks while they work."""
