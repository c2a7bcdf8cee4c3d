"""Writes, finds, verifies and loads checkpoints."""
