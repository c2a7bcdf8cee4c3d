"""Handles what interrupts training: signals, locked folders, full disks and failing ranks."""
