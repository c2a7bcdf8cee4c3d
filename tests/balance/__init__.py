"""Tests of wlb.balance: one step to ranks and micro-batches."""
