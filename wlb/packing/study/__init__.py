"""Measures, compares and tunes packing policies on a stream of global batches."""
