"""Comparisons of packing policies as tables, figures and an HTML page."""
