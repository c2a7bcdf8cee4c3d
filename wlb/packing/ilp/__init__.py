"""Packing by integer linear programming (Eq. 1 and 2), with PuLP and the solvers HiGHS or CBC."""
