"""Figures of a kernel profile."""
