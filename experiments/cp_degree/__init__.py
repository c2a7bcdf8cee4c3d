"""Compares fixed CP degrees, Megatron's schedulers of dynamic CP, and what dynamic degrees add."""
