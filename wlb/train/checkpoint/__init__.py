"""Checkpoints: their folders (`folder`), and how ranks write and load them (`saver`)."""
