"""Figures that compare the measurements of a kernel profile with its fits."""
