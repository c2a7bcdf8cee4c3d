"""Compare simulated and predicted times with measured ones."""
