"""Start the ranks of one machine, and explain failed runs."""
