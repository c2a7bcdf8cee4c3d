"""All policies on the same global batches: the rows of `wlb plan`.

The variants are derived from a run's own [packing] section, so that its S_max, T, thresholds and
maximum delay are what everyone is held to; the run's own policy is marked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from wlb.cost import WorkloadModel
from wlb.packing.base import Packer
from wlb.packing.ilp import IlpFixedPacker, IlpOptions
from wlb.packing.measure import PackingRun, measure
from wlb.packing.policies import options_for, packer_for
from wlb.plan import GlobalBatch
from wlb.spec import BinMethod, PackingSection, Policy, RunSpec, WindowCut

CONSTANT_TOKENS = 1.1
"""T of the variant that keeps tokens per step nearly constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A policy with its options, and its name in a table. is_own: what the run would train with."""

    label: str
    section: PackingSection
    is_own: bool = False


def variants_of(spec: RunSpec) -> tuple[Variant, ...]:
    """The comparison's rows; the run's own policy comes first and is not repeated."""
    base = spec.packing
    own = Variant(label=f"{_own(base)} (run)", section=base, is_own=True)
    others = [
        ("original", replace(base, policy=Policy.ORIGINAL, window_cut=WindowCut.ANYWHERE)),
        ("original, long whole", _original_whole(base)),
        *[
            (f"fixed, W = {w}", replace(base, policy=Policy.FIXED, window_batches=w))
            for w in (1, 2, 4, 8)
        ],
        *[
            (f"var_len {_listed(levels)}", _var_len(base, levels))
            for levels in _queue_levels(base.queue_thresholds)
        ],
        *_bounded(base),
        ("capacity, BFD", _capacity(base)),
    ]
    rest = [Variant(label=label, section=section) for label, section in others]
    return (own, *(v for v in rest if v.section != base and _can_catch_up(spec, v.section)))


def compare(
    spec: RunSpec,
    batches: Sequence[GlobalBatch],
    cost: WorkloadModel,
    variants: Sequence[Variant] | None = None,
) -> Iterator[PackingRun]:
    """What each variant does with `batches`, one after the other."""
    for variant in variants_of(spec) if variants is None else variants:
        packer = packer_for(replace(spec, packing=variant.section), cost)
        yield measure(packer, batches, cost=cost, label=variant.label)


def solver_packers(
    spec: RunSpec, cost: WorkloadModel, *, windows: Sequence[int] = (1, 2), time_limit_s: float
) -> tuple[tuple[str, Packer], ...]:
    """The fixed-length solver (Eq. 1) over W batches, for rows beside the greedy ones."""
    options = options_for(spec, cost)
    return tuple(
        (
            f"solver, W = {w}",
            IlpFixedPacker(
                options=options, window_batches=w, ilp=IlpOptions(time_limit_s=time_limit_s)
            ),
        )
        for w in windows
    )


def _original_whole(base: PackingSection) -> PackingSection:
    return replace(base, policy=Policy.ORIGINAL, window_cut=WindowCut.SHORT)


def _var_len(base: PackingSection, levels: tuple[float, ...]) -> PackingSection:
    return replace(base, policy=Policy.VAR_LEN, queue_thresholds=levels)


def _capacity(base: PackingSection) -> PackingSection:
    return replace(
        base,
        policy=Policy.CAPACITY,
        bin_method=BinMethod.BEST_FIT_DECREASING,
        window_batches=1,
    )


def _can_catch_up(spec: RunSpec, section: PackingSection) -> bool:
    """Whether a step may take more than a batch brings; `bounded` cannot be without."""
    if section.policy != Policy.BOUNDED:
        return True
    most = spec.num_micro_batches * section.s_max_tokens(spec.data.context_window)
    cap = section.step_tokens_of(spec.tokens_per_step)
    return min(most, cap or most) > spec.tokens_per_step


def _bounded(base: PackingSection) -> list[tuple[str, PackingSection]]:
    """As configured, and with nearly constant tokens per step."""
    section = replace(base, policy=Policy.BOUNDED)
    cap = f"T {section.step_tokens:g}" if section.step_tokens else f"S_max {section.s_max:g}"
    out = [(f"bounded {cap} D {section.max_delay}", section)]
    if min(section.step_tokens or section.s_max, section.s_max) > CONSTANT_TOKENS:
        label = f"bounded T {CONSTANT_TOKENS:g} D {section.max_delay}"
        out.append((label, replace(section, step_tokens=CONSTANT_TOKENS)))
    return out


def _queue_levels(levels: tuple[float, ...]) -> list[tuple[float, ...]]:
    """One queue, the configured ones, and one more between the first two."""
    if not levels:
        return [()]
    out = [levels[:1], levels]
    if len(levels) > 1 and levels[1] - levels[0] >= 0.02:
        middle = round((levels[0] + levels[1]) / 2, 3)
        out.append((levels[0], middle, *levels[1:]))
    return list(dict.fromkeys(out))


def _own(section: PackingSection) -> str:
    """The run's policy, with the options that the other rows vary."""
    match section.policy:
        case Policy.FIXED:
            return f"fixed, W = {section.window_batches}"
        case Policy.VAR_LEN:
            return f"var_len {_listed(section.queue_thresholds)}"
        case Policy.BOUNDED:
            return _bounded(section)[0][0]
        case Policy.ORIGINAL if section.window_cut == WindowCut.SHORT:
            return "original, long whole"
        case policy:
            return str(policy)


def _listed(levels: tuple[float, ...]) -> str:
    return "L " + " ".join(f"{t:g}" for t in levels) if levels else "no queue"
