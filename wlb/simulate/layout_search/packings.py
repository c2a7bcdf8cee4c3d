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
"""Outlier queue thresholds tried in addition to a run's own, in windows."""
POLICIES = (Policy.BOUNDED, Policy.VAR_LEN, Policy.FIXED, Policy.ORIGINAL)
CHOSEN = (Policy.BOUNDED, Policy.VAR_LEN, Policy.FIXED)
"""`original` is tried on request only: it cuts documents at windows and so skips the attention over
the cuts, which is less work rather than faster work."""
STRATEGIES = (Strategy.BALANCED, Strategy.HYBRID, Strategy.ADAPTIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingChoices:
    """Values to try. s_max in windows and step_tokens in global batches (0 = no cap), as in
    [packing], are lowered as far as memory requires. queues: thresholds of Algorithm 1,
    micro_batches: per window, weight_delays: of zero-bubble; each in addition to the run's own or
    1.
    """

    policies: tuple[Policy, ...] = CHOSEN
    s_max: tuple[float, ...] = (1.25, 1.5, 2.0)
    step_tokens: tuple[float, ...] = (0.0, 1.1, 1.5)
    queues: tuple[tuple[float, ...], ...] = QUEUES
    strategies: tuple[Strategy, ...] = STRATEGIES
    micro_batches: tuple[float, ...] = (1.25, 1.5)
    weight_delays: tuple[int, ...] = (2, 4)

    def __post_init__(self) -> None:
        for name in ("policies", "s_max", "step_tokens", "strategies"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty; give at least one to try")
        low = [f for f in self.micro_batches if not f > 1]
        if low:
            raise UserError(f"micro_batches = {low[0]} a window must be above 1")
        unknown = [p for p in self.policies if p not in POLICIES]
        if unknown:
            raise UserError(f"policy {unknown[0]} is not tried; use {', '.join(POLICIES)}")

    def packings(self, candidate: Candidate) -> list[PackingSection]:
        """Return a layout's packings; longer micro-batches are tried only where they fit."""
        base = candidate.spec.packing.ungrouped
        out: list[PackingSection] = []
        for policy in self.policies:
            if policy in (Policy.FIXED, Policy.ORIGINAL):
                out.append(replace(base, policy=policy, window_batches=1, memory_gib=0.0))
            elif candidate.caps is not None:
                out += self._capped(replace(base, policy=policy), candidate.spec)
        return out

    def first(self, candidate: Candidate) -> list[PackingSection]:
        """The packing of each policy that layouts are ranked with: most room, capped T; the first
        that finds room counts.
        """
        best: dict[Policy, PackingSection] = {}
        for made in self.packings(candidate):
            known = best.setdefault(made.policy, made)
            if (made.s_max, made.step_tokens) > (known.s_max, known.step_tokens):
                best[made.policy] = made
        return list(best.values())

    def more_micro_batches(self, spec: RunSpec) -> Iterator[RunSpec]:
        """`spec` with more micro-batches than windows, where that is possible and useful."""
        if spec.parallel.pp == 1 or not spec.packing.varies_lengths:
            return
        dp = max(1, spec.parallel.dp)
        windows = spec.num_windows // dp
        for number in sorted({math.ceil(round(windows * f, 6)) for f in self.micro_batches}):
            packing = replace(spec.packing, num_micro_batches=number * dp)
            # A schedule may need rounds of equal size.
            with suppress(UserError):
                yield check(replace(spec, packing=packing))

    def later_weights(self, spec: RunSpec) -> Iterator[RunSpec]:
        """`spec` with the weights' passes of zero-bubble delayed further."""
        for delay in self.weight_delays if spec.splits_backward else ():
            yield replace(spec, pp=replace(spec.pp, weight_delay=delay))

    def _capped(self, section: PackingSection, spec: RunSpec) -> Iterator[PackingSection]:
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
    """`spec` with this packing and sharding; remainders of documents are merged into chunks."""
    sharding = replace(spec.sharding, strategy=strategy, remainder=Remainder.MERGED)
    return replace(spec, packing=packing, sharding=sharding)
