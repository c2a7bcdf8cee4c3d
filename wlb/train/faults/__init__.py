"""Interruptions of training: signals, locks, non-finite losses, failing ranks."""
