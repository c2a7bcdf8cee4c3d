"""Measured and predicted times of steps, and the files and screen that show them."""
