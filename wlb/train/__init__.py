"""Trains a run: starts ranks, runs the training loop, saves checkpoints and reports."""
