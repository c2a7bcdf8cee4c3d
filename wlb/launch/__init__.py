"""Start the ranks of one machine, and explain runs that failed."""
