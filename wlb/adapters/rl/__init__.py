"""Balanced steps in RL post-training: one thin file per host, imported by name."""
