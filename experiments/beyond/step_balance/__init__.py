"""Compares one step's balance by `wlb.balance_step` and by the functions of other frameworks."""
