"""Measures the times of steps, compares them with predictions, and records and shows them."""
