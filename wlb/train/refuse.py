"""Checks before ranks start whether a run can work, so that it fails early with a one-line error.

Opening the run's planner reads the lengths of documents and the kernel profile, which finds errors
in both. Planning the next step of a resumed run finds out whether the planner's state in the
checkpoint belongs to another corpus or seed.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from wlb.cost import ProfiledWorkload, mismatches, workload_for
from wlb.data import StoreName
from wlb.kernels.grouped import waits_for_host
from wlb.parallel.build import compute_dtype, fused_of, kernel_of, linear_of
from wlb.parallel.collectives import agree
from wlb.parallel.compiled import refuse_uncompilable
from wlb.parallel.host import host_group
from wlb.parallel.mesh import Mesh
from wlb.parallel.world import World
from wlb.plan import PlannerState, UserError
from wlb.planner import Planner, check_planner_state, open_heldout_planner, open_planner
from wlb.spec import ModelSpec, RunSpec
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.memory_check import budget_of, check_budget
from wlb.train.refuse_inputs import check_stores, check_weights, model_of, refuse_snapshots
from wlb.train.telemetry.sinks import refuse_missing

MEANING = (
    *("norm_eps", "rope_theta", "sliding_window", "full_every", "full_first"),
    *("attention_softcap", "logit_softcap", "activation", "query_scale_size"),
    *("zero_centred_norms", "scaled_embeddings", "sliding_rope_theta", "rotary_share"),
    *("experts.per_token", "experts.scoring", "experts.normalised"),
)
"""Keys of the section [model] that change a model's output but not the shape of any weight.

`_meaning` adds the keys of the section [model.rope_scaling], which also do."""

Probe = Callable[..., Any]
"""A function `probe(fn, *args)` that calls `fn(*args)`, where `fn` is a check that uses a GPU.

`probe_here` calls the check in this process. Other probes call it in a child process, so that this
process does not create a CUDA context."""


def probe_here(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn(*args)` in this process, not in a child: for processes that use the GPU anyway."""
    return fn(*args)


def refuse_early(
    spec: RunSpec,
    *,
    train: StoreName,
    heldout: str,
    device: str,
    resume: Path | None,
    init_from: Path | None,
    probe: Probe = probe_here,
) -> Planner:
    """Check whether a run can work, before its ranks start.

    Args:
        spec: The run, with the data-parallel size and other derived values filled in.
        train: Name of the token store.
        heldout: Prefix of the held-out store; "" without one.
        device: Kind of device, "cpu" or "cuda".
        resume: The checkpoint to resume from; None for a new run.
        init_from: The checkpoint whose weights a new run begins with; None for random weights.
        probe: Calls checks that use a GPU, in this process or in a child process.

    Returns:
        The planner of the run's steps, which the checks have opened.

    Raises:
        UserError: If the run cannot work. The message says why and what to do.
    """
    refuse_missing(spec)
    refuse_snapshots(spec, device)
    if spec.training.compile:
        probe(refuse_uncompilable, spec.training.compile_backend, torch.device(device))
    priced = with_backend(spec, device)
    planner = open_planner(priced, train, device)
    check_stores(spec, train=train, heldout=heldout)
    if spec.eval.steps and heldout:
        open_heldout_planner(priced, heldout, device)
    if init_from is not None:
        check_weights(spec.model, init_from, "checkpoint.init_from")
    if resume is not None:
        check_weights(spec.model, resume, "--resume")
        state = checkpoint.planner_state(resume)
        _check_resumed(state, resume, planner)
        planner.next(state.reopened())
    return planner


def _check_resumed(state: PlannerState, saved_in: Path, planner: Planner) -> None:
    """Raise UserError unless a checkpoint's planner state fits the run's data and the weights.

    The weights can have had at most one update per planned step. They may have had fewer updates
    than steps, because steps without targets update nothing.
    """
    check_planner_state(state, planner.source, packers=planner.packers)
    run = checkpoint.read_run(saved_in)
    if (updates := run["step"]) > state.next_step:
        raise UserError(
            f"the checkpoint {saved_in} mixes files of two saves: its weights have "
            f"{updates} updates, but its planner state has only {state.next_step} "
            "steps; resume from another checkpoint"
        )
    found = {"next_step": state.next_step, "policy": state.carry.policy}
    # Checkpoints that earlier versions of wlb saved lack the entry "planner".
    if (said := run.get("planner", found)) != found:
        raise UserError(
            f"the checkpoint {saved_in} mixes files of two saves: run.json records "
            f"{said}, but planner.json has {found}; resume "
            "from another checkpoint"
        )


def with_backend(spec: RunSpec, device: str) -> RunSpec:
    """Replace the attention kernel `auto` by the kernel that it selects on `device`.

    The plans of the returned spec are priced with that kernel's table in the kernel profile.
    """
    kernel = kernel_of(spec, torch.device(device)).backend
    return replace(spec, kernels=replace(spec.kernels, attention=kernel))


def agree_on_kernel(
    spec: RunSpec, world: World, mesh: Mesh, *, stores: object = None
) -> tuple[RunSpec, str]:
    """Check that all ranks have the same kernels, profile and token stores. A collective call.

    Devices and installed packages may differ between nodes, and ranks that price documents with
    different kernels or profiles would make different plans. Each rank also checks that the run
    fits into the memory of its device.

    Args:
        spec: The run.
        world: This rank's place among the processes of the launcher.
        mesh: This rank's place in the layout.
        stores: A value that identifies the token stores that this rank reads
            (`StoreReader.identity`).

    Returns:
        The spec with the attention kernel that all ranks use, and the name of the kernel profile.

    Raises:
        ValueError: If ranks have different kernels, profiles or stores, or if a rank cannot compute
            the run or lacks memory. All ranks raise it.
    """
    priced, profile, fused, linear, problem = spec, "", False, "", None
    try:
        priced = with_backend(spec, mesh.device.type)
        profile = workload_for(priced, mesh.device.type).profile.name
        fused = fused_of(spec, mesh.device).fused
        if spec.model.linear.num_value_heads:
            linear = str(linear_of(spec, mesh.device)[0])
        # Devices may differ between nodes, so every rank checks the memory of its own device.
        check_budget(spec, budget_of(spec, mesh.device.type))
    # Do not raise the error here, because the other ranks wait for this rank in `agree`, which then
    # raises it on all ranks.
    except ValueError as error:
        problem = error
    group = host_group() if world.world_size > 1 else None
    declared = {"attention kernel": priced.kernels.attention, "kernel profile": profile}
    declared |= {"fused kernels": fused, "token stores": stores}
    declared |= {"kernel of linear layers": linear}
    agree(declared, problem, group=group)
    return priced, profile


def computed_by(spec: RunSpec, device: str, probe: Probe = probe_here) -> str:
    """Describe for the log which kernels compute the run, and why.

    Args:
        spec: The run.
        device: Kind of device, "cpu" or "cuda".
        probe: Calls checks that use a GPU, in this process or in a child process.

    Returns:
        One line for each of these: the attention kernel; the fused kernels; the implementation of
            linear-attention layers, if the model has any; and for a model with experts, whether the
            host must wait for the device to know how many tokens each expert gets.

    Raises:
        UserError: If no kernel can compute the run on this device.
    """
    where = torch.device(device)
    lines = [kernel_of(spec, where).line, probe(fused_of, spec, where).line]
    if spec.model.linear.num_value_heads:
        lines.append(linear_of(spec, where)[1])
    if spec.model.experts.num:
        lines.append(waits_for_host(where, compute_dtype(spec)))
    return "\n".join(filter(None, lines))


def priced_by(planner: Planner) -> str:
    """Describe for the log which profile prices the plans, and where it differs from the run.

    For example, the profile may have been measured with another number of heads than the model has.
    """
    cost = priced_workload(planner)
    profile, kernel = cost.profile, cost.table.backends[0]
    line = (
        f"plans priced by kernel profile {profile.name!r} ({profile.provenance.kind}, {kernel} "
        f"with {cost.table.num_heads} heads of size {cost.table.head_dim})"
    )
    return "; ".join([line, *mismatches(cost)])


def priced_workload(planner: Planner) -> ProfiledWorkload:
    """Return the model that prices a run's plans. In training it always has a kernel profile."""
    assert isinstance(planner.cost, ProfiledWorkload)
    return planner.cost


def model_change(model: ModelSpec, saved_in: Path) -> str:
    """Return a line for the log if the run's model differs from that of a checkpoint, else "".

    Only configuration keys are compared that change the model's output but no weight's shape
    (`MEANING`). For example, long-context training continues with the same weights but another RoPE
    scaling.

    Args:
        model: The run's model.
        saved_in: The checkpoint.
    """
    theirs = model_of(saved_in)
    ours, before = _meaning(model), _meaning(theirs)
    changed = [
        f"model.{name} = {ours[name]} instead of {before[name]}"
        for name in ours
        if ours[name] != before[name]
    ]
    return (
        f"the run continues the weights of {saved_in} with a changed model: {', '.join(changed)}"
        if changed
        else ""
    )


def _meaning(model: ModelSpec) -> dict[str, object]:
    """Return the values of the model's keys that change its output but no weight's shape.

    Two models whose weights have equal shapes compute the same output if these values are equal.
    """
    scaling = {f"rope_scaling.{key}": value for key, value in asdict(model.rope_scaling).items()}
    # `bounds` fills in the defaults, so that a default and the same explicit values compare equal.
    scaling["rope_scaling.turns"] = model.rope_scaling.bounds
    named = {name: attrgetter(name)(model) for name in MEANING}
    # Without experts, the keys of experts have no effect.
    has_experts = model.experts.num > 0
    used = {n: v for n, v in named.items() if has_experts or not n.startswith("experts.")}
    return used | scaling
