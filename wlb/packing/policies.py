"""The packer that a run's [packing] section names."""

from dataclasses import replace

from wlb.cost import WorkloadModel, token_caps
from wlb.packing.base import Packer, PackerOptions
from wlb.packing.bounded import BoundedPacker
from wlb.packing.capacity import CapacityPacker
from wlb.packing.examples import ExamplesPacker
from wlb.packing.fixed import FixedPacker
from wlb.packing.original import OriginalPacker
from wlb.packing.var_len import VarLenPacker
from wlb.plan import Layout
from wlb.spec import Policy, RunSpec

GIB = 1 << 30


def options_for(spec: RunSpec, cost: WorkloadModel) -> PackerOptions:
    """What all policies of a run are told."""
    return PackerOptions(
        num_micro_batches=spec.num_micro_batches,
        num_windows=spec.num_windows,
        context_window=spec.data.context_window,
        cost=cost,
        long_documents=str(spec.data.long_documents),
        seed=spec.run.seed,
        layout=spec.packing.layout,
    )


def baseline_for(spec: RunSpec, cost: WorkloadModel) -> OriginalPacker:
    """Plain-4D as the run's loader would fill its windows."""
    options = replace(
        options_for(spec, cost), num_micro_batches=spec.num_windows, layout=Layout.SEPARATE
    )
    return OriginalPacker(options=options, cut=spec.packing.window_cut)


def packer_for(spec: RunSpec, cost: WorkloadModel) -> Packer:
    """The packer of `spec.packing`; ValueError for options that cannot work together."""
    packing, options = spec.packing, options_for(spec, cost)
    match packing.policy:
        case Policy.ORIGINAL:
            return OriginalPacker(options=options, cut=packing.window_cut)
        case Policy.FIXED:
            return FixedPacker(
                options=options,
                window_batches=packing.window_batches,
                grouping=packing.grouping,
            )
        case Policy.CAPACITY:
            return CapacityPacker(
                options=options,
                method=packing.bin_method,
                capacity=packing.bin_windows * spec.data.context_window,
                pack_batches=packing.window_batches,
                open_bins=packing.open_bins,
            )
        case Policy.EXAMPLES:
            return ExamplesPacker(
                options=options, examples=packing.examples, by_length=packing.by_length
            )
        case Policy.VAR_LEN:
            s_max, step_tokens = caps_of(spec)
            return VarLenPacker(
                options=options,
                s_max=s_max,
                step_tokens=step_tokens,
                queue_thresholds=spec.queue_thresholds,
                literal=packing.literal,
            )
        case Policy.BOUNDED:
            s_max, step_tokens = caps_of(spec)
            return BoundedPacker(
                options=options,
                s_max=s_max,
                step_tokens=step_tokens,
                max_delay=packing.max_delay,
                delay_price=packing.delay_price or None,
            )


def caps_of(spec: RunSpec) -> tuple[int, int | None]:
    """(S_max, T) in tokens: as configured, and lower where packing.memory_gib asks for it."""
    s_max, step_tokens = spec.s_max, spec.packing.step_tokens_of(spec.tokens_per_step)
    if not spec.packing.memory_gib:
        return s_max, step_tokens
    caps = token_caps(spec, memory_bytes=int(spec.packing.memory_gib * GIB))
    s_max = min(s_max, caps.s_max)
    if caps.step_tokens is not None:
        step_tokens = min(step_tokens or caps.step_tokens, caps.step_tokens)
    if s_max < spec.data.context_window:
        raise ValueError(
            f"packing.memory_gib = {spec.packing.memory_gib}: a micro-batch of at most {s_max} "
            f"tokens fits, less than the context window of {spec.data.context_window}; use more "
            f"ranks (parallel.tp, cp, pp) or a smaller window"
        )
    if step_tokens is not None and step_tokens <= spec.tokens_per_step:
        raise ValueError(
            f"packing.memory_gib = {spec.packing.memory_gib}: a step of at most {step_tokens} "
            f"tokens fits, no more than the {spec.tokens_per_step} that a global batch brings; "
            f"lower packing.s_max or the window, or use more ranks (parallel.tp, cp, pp)"
        )
    return s_max, step_tokens
