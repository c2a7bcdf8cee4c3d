"""Memory of a rank: estimates, budgets of devices, and the S_max and T that fit into a budget."""

from wlb.lazy import attach

attach(__name__)
