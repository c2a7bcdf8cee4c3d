"""The settings of packing and sharding that `wlb tune layout` tries with each layout."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from wlb.memory import planned_gib
from wlb.plan import UserError
from wlb.simulate.layout_search.layouts import Candidate
from wlb.spec import PackingSection, Policy, Remainder, RunSpec, Strategy, check

QUEUES = ((0.2, 0.63), (0.4,))
"""Thresholds of Algorithm 1 to try besides the run's own, as fractions of the context window."""
POLICIES = (Policy.BOUNDED, Policy.VAR_LEN, Policy.FIXED, Policy.ORIGINAL)
"""Packing policies that can be tried."""
CHOSEN = (Policy.BOUNDED, Policy.VAR_LEN, Policy.FIXED)
"""Packing policies that are tried by default.

The policy `original` is only tried if the user asks for it. This policy cuts documents where a
window ends, and tokens after a cut do not attend to those before it. So it saves time by doing less
work.
"""
STRATEGIES = (Strategy.BALANCED, Strategy.HYBRID, Strategy.ADAPTIVE)
"""Sharding strategies that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingChoices:
    """Values of packing and sharding to try; S_max and T are lowered if memory requires it."""

    policies: tuple[Policy, ...] = CHOSEN  # packing policies
    s_max: tuple[float, ...] = (1.25, 1.5, 2.0)  # values of S_max, in windows
    step_tokens: tuple[float, ...] = (0.0, 1.1, 1.5)  # values of T, in global batches; 0: no limit
    # thresholds of Algorithm 1 to try besides the run's own, as fractions of the context window
    queues: tuple[tuple[float, ...], ...] = QUEUES
    strategies: tuple[Strategy, ...] = STRATEGIES  # sharding strategies
    # numbers of micro-batches of a step to try besides N, as multiples of N
    micro_batches: tuple[float, ...] = (1.25, 1.5)
    # values of `pp.weight_delay` to try besides the run's own: with delay k, pipeline rank r runs
    # weight-gradient passes r * k passes later (zero-bubble schedules only)
    weight_delays: tuple[int, ...] = (2, 4)

    def __post_init__(self) -> None:
        for name in ("policies", "s_max", "step_tokens", "strategies"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty; give at least one value for the search to try")
        low = [f for f in self.micro_batches if not f > 1]
        if low:
            raise UserError(
                f"micro_batches = {low[0]} must be above 1: it multiplies data.num_windows, "
                "and factor 1 is always tried; give a factor such as 1.25"
            )
        unknown = [p for p in self.policies if p not in POLICIES]
        if unknown:
            raise UserError(
                f"policy {unknown[0]} is not supported by the search; use {', '.join(POLICIES)}"
            )

    def packings(self, candidate: Candidate) -> list[PackingSection]:
        """Return the packings to try with a layout.

        Packings with micro-batches longer than a window are included only if memory allows them.
        """
        base = candidate.spec.packing.ungrouped
        out: list[PackingSection] = []
        for policy in self.policies:
            if policy in (Policy.FIXED, Policy.ORIGINAL):
                out.append(replace(base, policy=policy, window_batches=1, memory_gib=0.0))
            elif candidate.caps is not None:
                out += self._capped(replace(base, policy=policy), candidate.spec)
        return out

    def first(self, candidate: Candidate) -> list[PackingSection]:
        """Return one packing of each policy, to compare layouts before all packings are tried.

        It is the packing with the largest S_max, and the largest T for that S_max. If several
        packings of a policy have both, it is the first of them.
        """
        best: dict[Policy, PackingSection] = {}
        for made in self.packings(candidate):
            known = best.setdefault(made.policy, made)
            if (made.s_max, made.step_tokens) > (known.s_max, known.step_tokens):
                best[made.policy] = made
        return list(best.values())

    def more_micro_batches(self, spec: RunSpec) -> Iterator[RunSpec]:
        """Yield the run with each number of micro-batches that is N times one of `micro_batches`.

        The products are rounded up to multiples of dp. Numbers that the schedule does not allow are
        left out. Nothing is yielded if pp = 1, or if the policy packs windows of C tokens.
        """
        if spec.parallel.pp == 1 or not spec.packing.varies_lengths:
            return
        dp = max(1, spec.parallel.dp)
        windows = spec.num_windows // dp
        for number in sorted({math.ceil(round(windows * f, 6)) for f in self.micro_batches}):
            packing = replace(spec.packing, num_micro_batches=number * dp)
            # Some schedules need rounds of equal size, and refuse other numbers.
            with suppress(UserError):
                yield check(replace(spec, packing=packing))

    def later_weights(self, spec: RunSpec) -> Iterator[RunSpec]:
        """Yield the run with each value of `pp.weight_delay` to try.

        With this key a zero-bubble schedule delays weight gradients by more passes. Nothing is
        yielded if the schedule does not split backward.
        """
        for delay in self.weight_delays if spec.splits_backward else ():
            yield replace(spec, pp=replace(spec.pp, weight_delay=delay))

    def _capped(self, section: PackingSection, spec: RunSpec) -> Iterator[PackingSection]:
        """Yield `section` with each S_max and T to try, and with each list of thresholds.

        Only Algorithm 1 has thresholds.

        Args:
            section: A packing section whose policy is set.
            spec: The run.
        """
        section = replace(section, memory_gib=planned_gib(spec))
        for s_max in self.s_max:
            for step_tokens in self.step_tokens:
                if step_tokens and step_tokens >= s_max:
                    # This T limits nothing, because even a step in which all micro-batches have
                    # S_max tokens does not exceed it.
                    continue
                made = replace(section, s_max=s_max, step_tokens=step_tokens)
                if section.policy == Policy.BOUNDED:
                    yield replace(made, delay_price=0.0)
                elif not step_tokens:
                    own = spec.packing.queue_thresholds
                    for queues in dict.fromkeys((own, *self.queues)):
                        yield replace(made, queue_thresholds=queues)


def with_settings(spec: RunSpec, packing: PackingSection, strategy: Strategy) -> RunSpec:
    """Return the run with this packing section and sharding strategy.

    `sharding.remainder` is set to "merged": tokens that are left over after dividing a document are
    added to its chunks, instead of becoming segments of their own.
    """
    sharding = replace(spec.sharding, strategy=strategy, remainder=Remainder.MERGED)
    return replace(spec, packing=packing, sharding=sharding)
