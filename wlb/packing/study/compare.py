"""Runs all packing policies on the same global batches, for the table of `wlb plan`.

Each row of the table is a variant of the run's [packing] section, with the same S_max, T,
thresholds and maximum delay. The run's configured policy is marked. Two settings may differ from
the run's, because some policies support only one value: policies that fill windows make as many
micro-batches as a global batch has windows, and policies that balance work use the layout
"separate", in which documents do not attend to each other.
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
"""T, in global batches, of the variant of `bounded` in which all steps have nearly equal numbers of
tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A packing policy with its options, one row in the table that compares policies."""

    label: str  # name of the variant in the table
    section: PackingSection
    is_own: bool = False  # whether this is the run's configured policy


def variants_of(spec: RunSpec) -> tuple[Variant, ...]:
    """Return the policies to compare: the run's configured one first, then all that differ from it.

    Policies whose steps have no room for a global batch are left out.
    """
    base = spec.packing
    if base.num_micro_batches == spec.num_windows:
        # `packing.num_micro_batches` = 0 stands for as many micro-batches as a global batch has
        # windows. The run sets this number itself. Write 0, as the other variants do; otherwise the
        # run's policy would be listed twice.
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
    """Pack `batches` with each variant, and yield its results.

    Args:
        spec: The run.
        batches: The global batches.
        cost: Workload model that predicts times.
        variants: The policies to compare. Defaults to `variants_of(spec)`.
    """
    for variant in variants_of(spec) if variants is None else variants:
        packer = packer_for(replace(spec, packing=variant.section), cost)
        yield measure(packer, batches, cost=cost, label=variant.label)


def solver_packers(
    spec: RunSpec, cost: WorkloadModel, *, windows: Sequence[int] = (1, 2), time_limit_s: float
) -> tuple[tuple[str, Packer], ...]:
    """Return packers that fill windows of C tokens by integer programming (Eq. 1).

    Args:
        spec: The run.
        cost: Workload model that predicts times.
        windows: Values of W, the number of global batches that are packed together. Each makes one
            packer.
        time_limit_s: Time limit of the solver for each W batches, in seconds.

    Returns:
        (label, packer) for each W.
    """
    section = replace(_in_windows(spec.packing), layout=Layout.SEPARATE)
    options = options_for(replace(spec, packing=section), cost)
    ilp = IlpOptions(time_limit_s=time_limit_s)
    return tuple(
        (f"solver, W = {w}", IlpFixedPacker(options=options, window_batches=w, ilp=ilp))
        for w in windows
    )


def _in_windows(base: PackingSection) -> PackingSection:
    """Return `base` with as many micro-batches as windows, for policies that fill windows."""
    return replace(base, num_micro_batches=0)


def _bounded(base: PackingSection) -> list[PackingSection]:
    """Return two [packing] sections with policy `bounded`: one as configured, one with a small T.

    In the second one, T (the most tokens of a step) is CONSTANT_TOKENS global batches, so that all
    steps have nearly equal numbers of tokens. The second one is left out if the first one already
    limits steps to so few tokens, by its T (in global batches) or S_max (in context windows).

    Args:
        base: The run's [packing] section.
    """
    section = replace(base, policy=Policy.BOUNDED)
    if min(section.step_tokens or section.s_max, section.s_max) <= CONSTANT_TOKENS:
        return [section]
    return [section, replace(section, step_tokens=CONSTANT_TOKENS)]


def _queue_levels(levels: tuple[float, ...]) -> list[tuple[float, ...]]:
    """Return the outlier thresholds to compare, each a tuple with one threshold for each queue.

    They are the first configured threshold alone, all configured thresholds, and all of them with
    one more between the first two.

    Args:
        levels: The configured thresholds, in context windows, ascending.
    """
    if not levels:
        return [()]
    out = [levels[:1], levels]
    if len(levels) > 1 and levels[1] - levels[0] >= 0.02:
        middle = round((levels[0] + levels[1]) / 2, 3)
        out.append((levels[0], middle, *levels[1:]))
    return list(dict.fromkeys(out))


def _label(section: PackingSection) -> str:
    """Return a row's name in the table: the policy and the options in which rows differ."""
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
