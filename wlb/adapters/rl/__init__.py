"""Adapters for RL post-training libraries, one module each (slime, torchtitan, TRL, verl)."""
