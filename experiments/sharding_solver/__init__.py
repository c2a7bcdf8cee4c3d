"""Compares `balanced` by need with an integer program's plans and bounds, offline."""
