"""Hold simulated and predicted times against measured ones."""
