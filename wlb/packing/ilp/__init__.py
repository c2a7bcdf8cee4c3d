"""The paper's solver (Eq. 1 and 2) through PuLP and HiGHS."""
