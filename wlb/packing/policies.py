"""Makes the packer that a run's [packing] section names, and limits S_max and T by memory.

`packer_for` is the only place that maps a policy's name to its class and options.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from wlb.cost import WorkloadModel
from wlb.memory import token_caps
from wlb.packing.base import Packer, PackerOptions, PolicyPacker, PriceRange
from wlb.packing.bounded import BoundedPacker
from wlb.packing.capacity import CapacityPacker
from wlb.packing.examples import ExamplesPacker
from wlb.packing.fixed import FixedPacker
from wlb.packing.ilp.packers import IlpFixedPacker, IlpVarLenPacker
from wlb.packing.original import OriginalPacker
from wlb.packing.saved_packs import SavedPacker
from wlb.packing.var_len import VarLenPacker
from wlb.plan import Layout, UserError
from wlb.spec import PackingSection, Policy, RunSpec, check

PACKERS: tuple[type[PolicyPacker], ...] = (
    BoundedPacker,
    CapacityPacker,
    ExamplesPacker,
    FixedPacker,
    IlpFixedPacker,
    IlpVarLenPacker,
    OriginalPacker,
    SavedPacker,
    VarLenPacker,
)
"""The classes of all policies. Planners use them to check the carry of a checkpoint."""
GIB = 1 << 30
MOST_AUTOMATIC_WINDOWS = 2
"""Largest S_max, in context windows, that is chosen with `packing.s_max = 0`. A larger one would
leave too little memory for the other micro-batches of a step."""
ROOM_OF_A_STEP = 1.1
"""T should be at least this many global batches. Steps need more tokens than a global batch has, to
catch up on delayed documents."""


def options_for(spec: RunSpec, cost: WorkloadModel) -> PackerOptions:
    """Return the options that all packing policies share, as the run's configuration sets them."""
    return PackerOptions(
        num_micro_batches=spec.num_micro_batches,
        num_windows=spec.num_windows,
        context_window=spec.data.context_window,
        cost=cost,
        seed=spec.run.seed,
        layout=spec.packing.layout,
    )


def has_room(spec: RunSpec, section: PackingSection) -> bool:
    """Return whether a step can have as many tokens as a global batch.

    For the policy `bounded`, a step must be able to have more, so that it can catch up on delays.

    Args:
        spec: The run.
        section: The [packing] section that is checked instead of the run's.
    """
    if not section.varies_lengths:
        return True
    num = section.num_micro_batches or spec.num_windows
    most = num * section.s_max_tokens(spec.data.context_window)
    cap = section.step_tokens_of(spec.tokens_per_step)
    is_bounded = section.policy == Policy.BOUNDED
    return min(most, cap or most) >= spec.tokens_per_step + is_bounded


def baseline_for(spec: RunSpec, cost: WorkloadModel) -> OriginalPacker:
    """Return a packer that works as the usual loader does, as a baseline for the run.

    It cuts documents wherever a window ends (`wlb.spec.USUAL`).
    """
    options = options_for(spec, cost)
    options = replace(options, num_micro_batches=spec.num_windows, layout=Layout.SEPARATE)
    return OriginalPacker(options=options)


def packer_for(spec: RunSpec, cost: WorkloadModel) -> Packer:
    """Return the packer that the run's [packing] section describes.

    Raises:
        UserError: If the options of the section contradict each other.
    """
    packing, options = spec.packing, options_for(spec, cost)
    match packing.policy:
        case Policy.ORIGINAL:
            return OriginalPacker(options=options, cut=packing.window_cut)
        case Policy.FIXED:
            return FixedPacker(options=options, window_batches=packing.window_batches)
        case Policy.CAPACITY:
            return CapacityPacker(
                options=options,
                method=packing.bin_method,
                capacity=packing.bin_windows * spec.data.context_window,
                pack_batches=packing.window_batches,
            )
        case Policy.EXAMPLES:
            return ExamplesPacker(
                options=options, examples=packing.examples, by_length=packing.groups_by_length
            )
        case Policy.VAR_LEN:
            s_max, step_tokens = caps_of(spec)
            return VarLenPacker(
                options=options,
                s_max=s_max,
                step_tokens=step_tokens,
                queue_thresholds=spec.queue_thresholds,
                hold=packing.hold,
                price_range=_price_range(packing),
            )
        case Policy.BOUNDED:
            s_max, step_tokens = caps_of(spec)
            return BoundedPacker(
                options=options,
                s_max=s_max,
                step_tokens=step_tokens,
                max_delay=packing.max_delay,
                delay_price=packing.delay_price or None,
                price_range=_price_range(packing),
            )


def _price_range(packing: PackingSection) -> PriceRange:
    low, high = packing.price_range
    return PriceRange(low=low, high=high)


def with_s_max(spec: RunSpec, *, planned_gib: float | None) -> RunSpec:
    """Return `spec` with `packing.s_max = 0` replaced by the best S_max that fits a device.

    The function tries values of S_max from 2 windows downwards, in steps of 1/20 window. The best
    one is the largest that leaves memory for steps of at least 1.1 global batches. If there is
    none, it is the largest that leaves memory for more than one global batch.

    Args:
        spec: The run.
        planned_gib: Memory of a device that plans may use (`wlb.cost.Budget`), unless
            `packing.memory_gib` says otherwise. None if unknown.

    Raises:
        UserError: If the memory is unknown or nothing fits.
    """
    packing, window = spec.packing, spec.data.context_window
    if not packing.takes_s_max_from_memory:
        return spec
    if not packing.varies_lengths:
        # Policies that fill windows ignore s_max, so use any valid value.
        return check(replace(spec, packing=replace(packing, s_max=1.0)))
    planned = packing.memory_gib or planned_gib
    if not planned:
        raise UserError(
            "packing.s_max = 0 derives S_max from the memory of the device, which is unknown on a "
            "CPU; set packing.s_max to a number of context windows, or set cluster.memory_gib to "
            "the memory of the device"
        )
    refused: list[UserError] = []
    fallback: RunSpec | None = None
    for twentieths in range(20 * MOST_AUTOMATIC_WINDOWS, 19, -1):
        made = replace(packing, s_max=twentieths / 20, memory_gib=planned)
        try:
            s_max, step_tokens = caps_of(replace(spec, packing=made))
            filled = check(replace(spec, packing=replace(made, s_max=s_max / window)))
        except UserError as error:
            refused.append(error)
            continue
        if step_tokens is None or step_tokens >= ROOM_OF_A_STEP * spec.tokens_per_step:
            return filled
        fallback = fallback or filled
    if fallback is None:
        raise refused[-1]
    return fallback


def first_with_room(alternatives: Sequence[RunSpec]) -> int:
    """Return the index of the first configuration whose steps have room for 1.1 global batches.

    If there is none, return the index of the first configuration that fits the memory at all.

    Args:
        alternatives: Configurations of a run, the preferred one first.

    Raises:
        UserError: If none of them fits. It is the error of the first configuration.
    """
    fitting: list[int] = []
    refused: list[UserError] = []
    for i, spec in enumerate(alternatives):
        try:
            room = _room(spec)
        except UserError as error:
            refused.append(error)
            continue
        if room is None or room >= ROOM_OF_A_STEP * spec.tokens_per_step:
            return i
        fitting.append(i)
    if not fitting:
        raise refused[0]
    return fitting[0]


def _room(spec: RunSpec) -> int | None:
    """Return the most tokens that a step can have, or None for policies that fill windows."""
    if not spec.packing.varies_lengths:
        return None
    s_max, step_tokens = caps_of(spec)
    return min(spec.num_micro_batches * s_max, step_tokens or sys.maxsize)


def caps_of(spec: RunSpec) -> tuple[int, int | None]:
    """Return S_max and T in tokens: as configured, or less if `packing.memory_gib` requires it.

    Returns:
        Most tokens of a micro-batch, and most tokens of a step (None = no limit).

    Raises:
        UserError: If a document of one window, or a global batch, would not fit the memory.
    """
    s_max, step_tokens = spec.s_max, spec.packing.step_tokens_of(spec.tokens_per_step)
    if not spec.packing.memory_gib:
        return s_max, step_tokens
    caps = token_caps(spec, memory_bytes=int(spec.packing.memory_gib * GIB))
    s_max = min(s_max, caps.s_max)
    if caps.step_tokens is not None:
        step_tokens = min(step_tokens or caps.step_tokens, caps.step_tokens)
    if s_max < spec.data.context_window:
        raise UserError(
            f"packing.memory_gib = {spec.packing.memory_gib} has room for micro-batches of at most "
            f"{s_max} tokens, which is less than data.context_window = {spec.data.context_window}; "
            "raise packing.memory_gib, parallel.tp, parallel.cp or parallel.pp, or lower "
            "data.context_window"
        )
    if step_tokens is not None and step_tokens <= spec.tokens_per_step:
        raise UserError(
            f"packing.memory_gib = {spec.packing.memory_gib} has room for steps of at most "
            f"{step_tokens} tokens, but they need room for more than a global batch "
            f"({spec.tokens_per_step} tokens), because documents that waited come on top; lower "
            "packing.s_max (shorter micro-batches leave more room for the step) or "
            "data.context_window, or raise packing.memory_gib, parallel.tp, parallel.cp or "
            "parallel.pp"
        )
    return s_max, step_tokens
