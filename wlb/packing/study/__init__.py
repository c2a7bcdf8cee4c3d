"""Policies beside each other: measured on a stream, compared, tuned."""
