"""Runs all packing policies on the same global batches, for the table of `wlb plan`.

Each row of the table is a variant of the run's [packing] section, with the same S_max, T,
thresholds and maximum delay. The run's configured policy is marked. Two settings may differ from
the run's because a policy supports nothing else: policies that fill windows make N micro-batches,
and balancing policies keep documents separate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from wlb.cost import WorkloadModel
from wlb.packing.base import Packer
from wlb.packing.ilp.packers import IlpFixedPacker, IlpOptions
from wlb.packing.policies import has_room, options_for, packer_for
from wlb.packing.study.measure import PackingRun, measure
from wlb.plan import GlobalBatch, Layout
from wlb.spec import PackingSection, Policy, RunSpec, WindowCut

CONSTANT_TOKENS = 1.1
"""T, in global batches, of the variant that keeps the tokens of a step nearly constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A row of the comparison: a policy with its options."""

    label: str  # its name in the table
    section: PackingSection
    is_own: bool = False  # whether it is the run's configured policy


def variants_of(spec: RunSpec) -> tuple[Variant, ...]:
    """Return the comparison's rows, the run's configured policy first and without repetition."""
    base = spec.packing
    if base.num_micro_batches == spec.num_windows:
        # Write the default as 0, as in the other rows, so that equal sections compare equal.
        base = replace(base, num_micro_batches=0)
    own = Variant(label=f"{_label(base)} (run)", section=base, is_own=True)
    windows, apart = _in_windows(base), replace(base, layout=Layout.SEPARATE)
    original = replace(windows, policy=Policy.ORIGINAL)
    fixed = replace(_in_windows(apart), policy=Policy.FIXED)
    var_len = replace(apart, policy=Policy.VAR_LEN)
    capacity = replace(windows, policy=Policy.CAPACITY, method="", window_batches=1)
    sections = [
        replace(original, window_cut=WindowCut.ANYWHERE),
        replace(original, window_cut=WindowCut.SHORT),
        *(replace(fixed, window_batches=w) for w in (1, 2, 4, 8)),
        *(replace(var_len, queue_thresholds=q) for q in _queue_levels(base.queue_thresholds)),
        *_bounded(apart),
    ]
    rest = [Variant(label=_label(section), section=section) for section in sections]
    rest.append(Variant(label="capacity, BFD", section=capacity))
    return (own, *(v for v in rest if v.section != base and has_room(spec, v.section)))


def compare(
    spec: RunSpec,
    batches: Sequence[GlobalBatch],
    cost: WorkloadModel,
    variants: Sequence[Variant] | None = None,
) -> Iterator[PackingRun]:
    """Run each variant (by default those of `variants_of`) on `batches` and yield its results."""
    for variant in variants_of(spec) if variants is None else variants:
        packer = packer_for(replace(spec, packing=variant.section), cost)
        yield measure(packer, batches, cost=cost, label=variant.label)


def solver_packers(
    spec: RunSpec, cost: WorkloadModel, *, windows: Sequence[int] = (1, 2), time_limit_s: float
) -> tuple[tuple[str, Packer], ...]:
    """Return (label, packer) of the fixed-length solver (Eq. 1) for each W in `windows`."""
    section = replace(_in_windows(spec.packing), layout=Layout.SEPARATE)
    options = options_for(replace(spec, packing=section), cost)
    ilp = IlpOptions(time_limit_s=time_limit_s)
    return tuple(
        (f"solver, W = {w}", IlpFixedPacker(options=options, window_batches=w, ilp=ilp))
        for w in windows
    )


def _in_windows(base: PackingSection) -> PackingSection:
    """Return the section for policies that fill windows, with one micro-batch for each window."""
    return replace(base, num_micro_batches=0)


def _bounded(base: PackingSection) -> list[PackingSection]:
    """Return `bounded` as configured, and with nearly constant tokens per step."""
    section = replace(base, policy=Policy.BOUNDED)
    if min(section.step_tokens or section.s_max, section.s_max) <= CONSTANT_TOKENS:
        return [section]
    return [section, replace(section, step_tokens=CONSTANT_TOKENS)]


def _queue_levels(levels: tuple[float, ...]) -> list[tuple[float, ...]]:
    """Return thresholds of one queue, the configured ones, and one more between the first two."""
    if not levels:
        return [()]
    out = [levels[:1], levels]
    if len(levels) > 1 and levels[1] - levels[0] >= 0.02:
        middle = round((levels[0] + levels[1]) / 2, 3)
        out.append((levels[0], middle, *levels[1:]))
    return list(dict.fromkeys(out))


def _label(section: PackingSection) -> str:
    """Return a row's label: the policy, with the options in which rows differ."""
    match section.policy:
        case Policy.FIXED:
            return f"fixed, W = {section.window_batches}"
        case Policy.VAR_LEN:
            levels = " ".join(f"{t:g}" for t in section.queue_thresholds)
            return f"var_len L {levels}" if levels else "var_len no queue"
        case Policy.BOUNDED:
            cap = (
                f"T {section.step_tokens:g}" if section.step_tokens else f"S_max {section.s_max:g}"
            )
            return f"bounded {cap} D {section.max_delay}"
        case Policy.ORIGINAL if section.window_cut == WindowCut.SHORT:
            return "original, long whole"
        case policy:
            return str(policy)
