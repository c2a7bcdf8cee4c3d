"""Balanced steps in RL post-training: one module per library, imported by its name."""
