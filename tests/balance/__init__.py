"""Tests of wlb.balance, which divides one step over ranks and micro-batches."""
