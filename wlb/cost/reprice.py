"""A run's workload at the prices that it learned while it trained (`wlb.plan.PriceFactors`)."""

from dataclasses import replace
from typing import Any

from wlb.cost.calibrate import scaled_profile
from wlb.cost.workload import ProfiledWorkload
from wlb.plan import AS_PROFILED, PriceFactors
from wlb.plan.prices import UNIT


def price_base(cost: ProfiledWorkload) -> str:
    """What learned prices are factors of: the profile and the kernel whose table prices plans."""
    return f"{cost.profile.name} {cost.table.backends[0]}"


def repriced(cost: ProfiledWorkload, prices: PriceFactors, *, device: str) -> ProfiledWorkload:
    """`cost`, at the profile's own prices, at others. Takes about 2 ms.

    device: on "cuda" the factors of linear layers hold for TP's and CP's collectives too, which are
    part of what is measured there; on "cpu" they are not.
    """
    if prices == AS_PROFILED:
        return cost
    factors: dict[str, Any] = prices.by_term
    profile = scaled_profile(
        cost.profile,
        **factors,
        linear_forward_extra_ns=prices.linear_forward_extra_ns,
        linear_backward_extra_ns=prices.linear_backward_extra_ns,
        name=cost.profile.name,
        provenance=cost.profile.provenance,
        collectives=device == "cuda",
    )
    load = prices.expert_load / UNIT if prices.expert_load else cost.expert_load
    return replace(cost, profile=profile, expert_load=load)
