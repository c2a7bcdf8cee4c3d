"""What ends or interrupts training: signals, locks, losses that are not finite, ranks that fail."""
