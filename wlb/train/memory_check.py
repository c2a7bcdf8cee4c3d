"""Compares the memory that a run needs with the memory of its devices, before any rank computes.

The estimate of `wlb.memory` is an upper bound on the memory of the fullest rank, for the largest
micro-batch (S_max) and the largest step (T) that packing may make. It must not exceed the budget of
`wlb.memory.budget`: the memory of a device without CUDA's context, NCCL's buffers and the
allocator's gaps.

The memory of a device is `cluster.memory_gib` if it is set, else the memory of the smallest GPU. On
a CPU without `cluster.memory_gib` it is unknown, and nothing is refused. Even if
`cluster.memory_gib` is larger than the GPU's memory, plans do not use more than the GPU has.
"""

from dataclasses import replace

from wlb.memory import Budget, MemoryEstimate, cpu_budget, gpu_budget, memory_estimate, token_caps
from wlb.memory.budget import ROUNDING, size_text
from wlb.memory.estimate import GIB
from wlb.packing import caps_of
from wlb.plan import UserError
from wlb.spec import RunSpec


def budget_of(spec: RunSpec, device: str) -> Budget | None:
    """Return the memory that each rank on `device` ("cpu" or "cuda") may use; None if unknown."""
    given = spec.cluster.memory_gib
    if device != "cuda":
        return cpu_budget(spec, gib=given, source="cluster.memory_gib") if given else None
    return gpu_budget(spec) if given else measured_budget(spec)


def measured_budget(spec: RunSpec) -> Budget | None:
    """Return the memory of the smallest GPU of this machine; None without a GPU.

    `cluster.memory_gib` is ignored.
    """
    # This module is imported here, so that a dry run, which needs no device, does not import torch.
    from wlb.parallel import world as worlds

    size = worlds.device_memory_bytes()
    if size is None:
        return None
    return gpu_budget(spec, gib=size / GIB, source="the smallest GPU here")


def given_beyond(spec: RunSpec, measured: Budget | None) -> list[str]:
    """Return a warning if `cluster.memory_gib` is more than the GPU has, else an empty list.

    `measured` is the memory of the smallest GPU; None without a GPU.
    """
    given = spec.cluster.memory_gib
    if measured is None or given <= measured.gib:
        return []
    return [
        (
            f"WARNING: cluster.memory_gib = {given:g} is more than the "
            f"{measured.gib:.1f} GiB of {measured.source}. The run starts "
            "nevertheless, but may run out of memory"
        )
    ]


def estimate_of(spec: RunSpec) -> MemoryEstimate:
    """Estimate the memory of the fullest rank, for the largest micro-batches and steps allowed.

    If packing makes micro-batches of different lengths, the largest micro-batch has S_max tokens,
    and the largest step has T tokens.
    """
    if not spec.packing.varies_lengths:
        return memory_estimate(spec)
    s_max, step_tokens = caps_of(spec)
    return memory_estimate(spec, micro_batch_tokens=s_max, step_tokens=step_tokens)


def within(spec: RunSpec, budget: Budget | None) -> tuple[RunSpec, list[str]]:
    """Lower `packing.memory_gib` to the part of the device's memory that plans may use.

    The option `--system` and `wlb tune layout` compute `packing.memory_gib` from
    `cluster.memory_gib`, and a real device may have one GiB less than that.

    Args:
        spec: The run.
        budget: Memory of the device; on GPUs the measured memory. None leaves the spec as it is.

    Returns:
        The spec, and a line for the log if the key was lowered.
    """
    if budget is None:
        return spec, []
    planned, given = budget.planned_gib, spec.packing.memory_gib
    if given * GIB <= budget.planned_bytes or not planned:
        return spec, []
    lowered = replace(spec, packing=replace(spec.packing, memory_gib=planned))
    return lowered, [
        f"packing.memory_gib = {given:g} was lowered to {planned:g} to fit the {budget.explanation}"
    ]


def check_budget(spec: RunSpec, budget: Budget | None) -> list[str]:
    """Compare the estimated memory of the fullest rank with the memory that plans may use.

    Args:
        spec: The run.
        budget: Memory of the device; None skips the comparison.

    Returns:
        Lines for the log; none without a budget.

    Raises:
        UserError: If the estimate exceeds the budget.
    """
    if budget is None:
        return []
    estimate = estimate_of(spec)
    need = size_text(estimate.total_bytes)
    line = (
        f"memory: pipeline rank {estimate.pp_rank} needs most, about {need} of the "
        f"{budget.explanation}"
    )
    if estimate.total_bytes <= budget.planned_bytes * ROUNDING:
        return [line]
    raise UserError(too_much(estimate, budget))


def too_much(estimate: MemoryEstimate, budget: Budget) -> str:
    """Return the error message for a run that does not fit into memory.

    It says how much memory the fullest rank needs, for what, and what can be done.
    """
    terms = sorted(estimate.terms.items(), key=lambda term: -term[1])
    listed = ", ".join(f"{n.removesuffix('_bytes')} {size_text(size)}" for n, size in terms if size)
    return (
        f"pipeline rank {estimate.pp_rank} needs about {estimate.total_bytes:,} bytes "
        f"({size_text(estimate.total_bytes)}), more than the {budget.explanation}: "
        f"{listed}. Set training.recompute, a lower packing.s_max (0 = as large as "
        "fits), a shorter data.context_window or fsdp.reshard_after_forward, or use "
        "more ranks (parallel.tp, cp, pp, dp). To start the run nevertheless, raise "
        "cluster.memory_gib"
    )


def caps_line(spec: RunSpec, budget: Budget) -> str:
    """Return a line that says how large micro-batches and steps may be to fit into the memory."""
    try:
        caps = token_caps(spec, memory_bytes=budget.planned_bytes)
    except UserError as error:
        return f"no micro-batch fits into the memory: {error}"
    windows = caps.s_max / spec.data.context_window
    line = f"micro-batches of {caps.s_max:,} tokens (S_max {windows:.2f} windows), "
    if caps.step_tokens is None:
        line += "any number of them in a step"
    else:
        share = caps.step_tokens / spec.tokens_per_step
        line += f"steps of {caps.step_tokens:,} tokens (T {share:.2f} global batches)"
    return f"the {budget.explanation} fit {line}"
