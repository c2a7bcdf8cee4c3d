"""Compares the memory that a run needs with the memory of its devices, before any rank computes.

The estimate of `wlb.memory` is an upper bound on the memory of the fullest rank, for the largest
micro-batch (S_max) and the largest step (T) that packing may make. The estimate must not exceed the
budget of `wlb.memory.budget`, which is the memory of a device without CUDA's context, NCCL's
buffers and the allocator's gaps.

The memory of a device is `cluster.memory_gib` if this key is set, else the memory of the smallest
GPU. On a CPU without `cluster.memory_gib`, the memory is unknown and no run is refused. If
`cluster.memory_gib` is more than the GPU's memory, plans still use no more than the GPU has.
"""

from dataclasses import replace

from wlb.memory import Budget, MemoryEstimate, cpu_budget, gpu_budget, memory_estimate, token_caps
from wlb.memory.budget import ROUNDING, size_text
from wlb.memory.estimate import GIB
from wlb.packing import caps_of
from wlb.plan import UserError
from wlb.spec import RunSpec


def budget_of(spec: RunSpec, device: str) -> Budget | None:
    """Return a rank's device memory and how much of it plans may use; None if it is not known.

    `device` is "cpu" or "cuda".
    """
    given = spec.cluster.memory_gib
    if device != "cuda":
        return cpu_budget(spec, gib=given, source="cluster.memory_gib") if given else None
    return gpu_budget(spec) if given else measured_budget(spec)


def measured_budget(spec: RunSpec) -> Budget | None:
    """Return the memory budget of this machine's smallest GPU; None without a GPU.

    This function ignores `cluster.memory_gib`.
    """
    # Import here, so that a dry run, which does not call this function, does not import torch.
    from wlb.parallel import world as worlds

    size = worlds.device_memory_bytes()
    if size is None:
        return None
    return gpu_budget(spec, gib=size / GIB, source="the smallest GPU here")


def given_beyond(spec: RunSpec, measured: Budget | None) -> list[str]:
    """Return a list with a warning if `cluster.memory_gib` is more than the GPU has, else [].

    `measured` is the memory budget of this machine's smallest GPU; None without a GPU.
    """
    given = spec.cluster.memory_gib
    if measured is None or given <= measured.gib:
        return []
    return [
        (
            f"WARNING: cluster.memory_gib = {given:g} is more than the "
            f"{measured.gib:.1f} GiB of {measured.source}. The run starts "
            "nevertheless, but may run out of memory; lower cluster.memory_gib"
        )
    ]


def estimate_of(spec: RunSpec) -> MemoryEstimate:
    """Estimate the memory of the fullest rank, for the largest micro-batches and steps allowed.

    If packing makes micro-batches of unequal numbers of tokens, the largest micro-batch has S_max
    tokens, and the largest step has T tokens.
    """
    if not spec.packing.varies_lengths:
        return memory_estimate(spec)
    s_max, step_tokens = caps_of(spec)
    return memory_estimate(spec, micro_batch_tokens=s_max, step_tokens=step_tokens)


def within(spec: RunSpec, budget: Budget | None) -> tuple[RunSpec, list[str]]:
    """Lower `packing.memory_gib` if it is more than plans may use of a device's memory.

    The option `--system` and `wlb tune layout` compute `packing.memory_gib` from
    `cluster.memory_gib`, but a real device may have one GiB less than `cluster.memory_gib`.

    Args:
        spec: The run.
        budget: Memory of the device; on GPUs the measured memory. With None, nothing is changed.

    Returns:
        The spec, and a list with a line for the log if the key was lowered.
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
        budget: Memory of the device; with None, nothing is compared.

    Returns:
        A list with a line for the log; an empty list without a budget.

    Raises:
        UserError: If the estimate exceeds the memory that plans may use.
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

    The message says how much memory the fullest rank needs and for what, and what a user can do.
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
    """Return a line that says how large micro-batches and steps may be to fit into `budget`."""
    try:
        caps = token_caps(spec, memory_bytes=budget.planned_bytes)
    except UserError as error:
        return f"no micro-batch fits into the memory: {error}"
    windows = caps.s_max / spec.data.context_window
    line = f"micro-batches of {caps.s_max:,} tokens (S_max {windows:.2f} windows), "
    if caps.step_tokens is None:
        line += "and any number of them in a step"
    else:
        share = caps.step_tokens / spec.tokens_per_step
        line += f"and steps of {caps.step_tokens:,} tokens (T {share:.2f} global batches)"
    return f"the {budget.explanation} fit {line}"
