"""Memory of a rank: estimates, budgets of devices, and caps of packing that fit them."""

from wlb.lazy import attach

attach(__name__)
