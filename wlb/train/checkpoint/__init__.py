"""Checkpoints: their folders (`files`) and how ranks write and load them (`saver`)."""
