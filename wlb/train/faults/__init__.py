"""What interrupts training: signals, locks, non-finite losses, full disks, failing ranks."""
