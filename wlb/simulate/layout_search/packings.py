"""Packing and sharding choices that `wlb tune layout` tries with a layout."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from wlb.memory import planned_gib
from wlb.plan import UserError
from wlb.simulate.layout_search.layouts import Candidate
from wlb.spec import PackingSection, Policy, Remainder, RunSpec, Strategy, check

QUEUES = ((0.2, 0.63), (0.4,))
"""Thresholds of outlier queues to try besides a run's own, in windows."""
POLICIES = (Policy.BOUNDED, Policy.VAR_LEN, Policy.FIXED, Policy.ORIGINAL)
"""Policies that can be tried."""
CHOSEN = (Policy.BOUNDED, Policy.VAR_LEN, Policy.FIXED)
"""Policies that are tried by default.

`original` is tried on request only. It cuts documents at windows and so skips attention over the
cuts, which is less work rather than faster work.
"""
STRATEGIES = (Strategy.BALANCED, Strategy.HYBRID, Strategy.ADAPTIVE)
"""Sharding strategies that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingChoices:
    """Values to try. Caps are lowered as far as memory requires."""

    policies: tuple[Policy, ...] = CHOSEN  # packing policies
    s_max: tuple[float, ...] = (1.25, 1.5, 2.0)  # S_max in windows
    step_tokens: tuple[float, ...] = (0.0, 1.1, 1.5)  # T in global batches; 0: no cap
    # thresholds of Algorithm 1, besides the run's own
    queues: tuple[tuple[float, ...], ...] = QUEUES
    strategies: tuple[Strategy, ...] = STRATEGIES  # sharding strategies
    micro_batches: tuple[float, ...] = (1.25, 1.5)  # micro-batches per window, besides 1
    # delays of zero-bubble's weight-gradient passes, besides the run's own
    weight_delays: tuple[int, ...] = (2, 4)

    def __post_init__(self) -> None:
        for name in ("policies", "s_max", "step_tokens", "strategies"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty; give at least one to try")
        low = [f for f in self.micro_batches if not f > 1]
        if low:
            raise UserError(f"micro_batches = {low[0]} per window must be above 1")
        unknown = [p for p in self.policies if p not in POLICIES]
        if unknown:
            raise UserError(f"policy {unknown[0]} cannot be tried; use {', '.join(POLICIES)}")

    def packings(self, candidate: Candidate) -> list[PackingSection]:
        """Return the packings to try with a layout; longer micro-batches only if they fit."""
        base = candidate.spec.packing.ungrouped
        out: list[PackingSection] = []
        for policy in self.policies:
            if policy in (Policy.FIXED, Policy.ORIGINAL):
                out.append(replace(base, policy=policy, window_batches=1, memory_gib=0.0))
            elif candidate.caps is not None:
                out += self._capped(replace(base, policy=policy), candidate.spec)
        return out

    def first(self, candidate: Candidate) -> list[PackingSection]:
        """Return the packing of each policy with which layouts are compared first.

        It has the largest S_max, and the largest T among the choices that cap T. A layout uses the
        first policy that fits.
        """
        best: dict[Policy, PackingSection] = {}
        for made in self.packings(candidate):
            known = best.setdefault(made.policy, made)
            if (made.s_max, made.step_tokens) > (known.s_max, known.step_tokens):
                best[made.policy] = made
        return list(best.values())

    def more_micro_batches(self, spec: RunSpec) -> Iterator[RunSpec]:
        """Yield `spec` with more micro-batches than windows, if that is possible and useful."""
        if spec.parallel.pp == 1 or not spec.packing.varies_lengths:
            return
        dp = max(1, spec.parallel.dp)
        windows = spec.num_windows // dp
        for number in sorted({math.ceil(round(windows * f, 6)) for f in self.micro_batches}):
            packing = replace(spec.packing, num_micro_batches=number * dp)
            # The schedule may not allow this number: it may need rounds of equal size.
            with suppress(UserError):
                yield check(replace(spec, packing=packing))

    def later_weights(self, spec: RunSpec) -> Iterator[RunSpec]:
        """Yield `spec` with zero-bubble's weight-gradient passes delayed further."""
        for delay in self.weight_delays if spec.splits_backward else ():
            yield replace(spec, pp=replace(spec.pp, weight_delay=delay))

    def _capped(self, section: PackingSection, spec: RunSpec) -> Iterator[PackingSection]:
        """Yield `section` with each combination of caps, and of queues for Algorithm 1."""
        section = replace(section, memory_gib=planned_gib(spec))
        for s_max in self.s_max:
            for step_tokens in self.step_tokens:
                if step_tokens and step_tokens >= s_max:
                    # With this number of micro-batches, S_max alone keeps a step below T.
                    continue
                made = replace(section, s_max=s_max, step_tokens=step_tokens)
                if section.policy == Policy.BOUNDED:
                    yield replace(made, delay_price=0.0)
                elif not step_tokens:
                    own = spec.packing.queue_thresholds
                    for queues in dict.fromkeys((own, *self.queues)):
                        yield replace(made, queue_thresholds=queues)


def with_settings(spec: RunSpec, packing: PackingSection, strategy: Strategy) -> RunSpec:
    """Return `spec` with this packing and sharding; left-over tokens are merged into chunks."""
    sharding = replace(spec.sharding, strategy=strategy, remainder=Remainder.MERGED)
    return replace(spec, packing=packing, sharding=sharding)
