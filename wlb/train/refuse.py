"""Refuses a run before its ranks start, for the reasons and with the messages of ranks and
planners.

Opening the planners reads the stores' lengths and the kernel profile. Planning a resumed run's next
step refuses a planner state of another corpus or seed.
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
from wlb.planner import Planner, hold_state, open_heldout_planner, open_planner
from wlb.spec import ModelSpec, RunSpec
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.memory_check import budget_of, hold_against
from wlb.train.refuse_inputs import hold_stores, hold_weights, model_of, refuse_snapshots
from wlb.train.telemetry.sinks import refuse_missing

MEANING = (
    *("norm_eps", "rope_theta", "sliding_window", "full_every", "full_first"),
    *("attention_softcap", "logit_softcap", "activation", "query_scale_size"),
    *("zero_centred_norms", "scaled_embeddings", "sliding_rope_theta", "rotary_share"),
    *("experts.per_token", "experts.scoring", "experts.normalised"),
)
"""Keys that `_meaning` takes besides those of rope_scaling."""

Probe = Callable[..., Any]
"""Returns fn(*args) of a function that uses a GPU, in this process or in one of its own."""


def probe_here(fn: Callable[..., Any], *args: Any) -> Any:
    """The `Probe` of a process that will use the GPU anyway."""
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
    """UserError for a run that cannot work; else the planner of its steps, which was opened."""
    refuse_missing(spec)
    refuse_snapshots(spec, device)
    if spec.training.compile:
        probe(refuse_uncompilable, spec.training.compile_backend, torch.device(device))
    priced = with_backend(spec, device)
    planner = open_planner(priced, train, device)
    hold_stores(spec, train=train, heldout=heldout)
    if spec.eval.steps and heldout:
        open_heldout_planner(priced, heldout, device)
    if init_from is not None:
        hold_weights(spec.model, init_from, "checkpoint.init_from")
    if resume is not None:
        hold_weights(spec.model, resume, "--resume")
        state = checkpoint.planner_state(resume)
        _hold_resumed(state, resume, planner)
        planner.next(state.reopened())
    return planner


def _hold_resumed(state: PlannerState, saved_in: Path, planner: Planner) -> None:
    """UserError unless a checkpoint's planner state agrees with itself, the data and the updates
    that its weights had: at most one a step, since steps without labels update nothing.
    """
    hold_state(state, planner.source, own=planner.packers)
    run = checkpoint.read_run(saved_in)
    if (updates := run["step"]) > state.next_step:
        raise UserError(
            f"{saved_in} has {updates} updates of its weights, its planner state only "
            f"{state.next_step} steps; they are not of one save, so resume from another checkpoint"
        )
    found = {"next_step": state.next_step, "policy": state.carry.policy}
    # Checkpoints of earlier versions do not say it.
    if (said := run.get("planner", found)) != found:
        raise UserError(
            f"{saved_in} was saved with {said} of its planner, its planner state has {found}; they "
            f"are not of one save, so resume from another checkpoint"
        )


def with_backend(spec: RunSpec, device: str) -> RunSpec:
    """The spec with the kernel that `auto` means on `device`, so that its table prices plans."""
    kernel = kernel_of(spec, torch.device(device)).backend
    return replace(spec, kernels=replace(spec.kernels, attention=kernel))


def agree_on_kernel(
    spec: RunSpec, world: World, mesh: Mesh, *, stores: object = None
) -> tuple[RunSpec, str]:
    """The spec with the attention kernel that all ranks compute and price plans with, and the name
    of the kernel profile. A collective call. stores: identity of this rank's, which must be equal.

    ValueError on all ranks if theirs differ, or if one cannot compute or lacks memory: devices and
    installed packages may differ between nodes.
    """
    priced, profile, fused, linear, problem = spec, "", False, "", None
    try:
        priced = with_backend(spec, mesh.device.type)
        profile = workload_for(priced, mesh.device.type).profile.name
        fused = fused_of(spec, mesh.device).fused
        if spec.model.linear.num_value_heads:
            linear = str(linear_of(spec, mesh.device)[0])
        # Devices may differ between nodes, so every rank checks its own.
        hold_against(spec, budget_of(spec, mesh.device.type))
    # Every ValueError is caught, because the other ranks wait for this one.
    except ValueError as error:
        problem = error
    group = host_group() if world.world_size > 1 else None
    declared = {"attention kernel": priced.kernels.attention, "kernel profile": profile}
    declared |= {"fused kernels": fused, "token stores": stores}
    declared |= {"kernel of linear layers": linear}
    agree(declared, problem, group=group)
    return priced, profile


def computed_by(spec: RunSpec, device: str, probe: Probe = probe_here) -> str:
    """Lines for the log: the attention kernel, whether kernels are fused, and why; and whether
    products of experts wait. UserError for a kernel that cannot compute here.
    """
    where = torch.device(device)
    lines = [kernel_of(spec, where).line, probe(fused_of, spec, where).line]
    if spec.model.linear.num_value_heads:
        lines.append(linear_of(spec, where)[1])
    if spec.model.experts.num:
        lines.append(waits_for_host(where, compute_dtype(spec)))
    return "\n".join(filter(None, lines))


def priced_by(planner: Planner) -> str:
    """A line for the log: the kernel profile, its origin, and how it differs from the model."""
    cost = priced_workload(planner)
    profile, kernel = cost.profile, cost.table.backends[0]
    line = (
        f"plans priced by kernel profile {profile.name!r} ({profile.provenance.kind}, {kernel} of "
        f"{cost.table.num_heads} heads of {cost.table.head_dim})"
    )
    return "; ".join([line, *mismatches(cost)])


def priced_workload(planner: Planner) -> ProfiledWorkload:
    """Return the workload model that prices a run's plans, always of a kernel profile."""
    assert isinstance(planner.cost, ProfiledWorkload)
    return planner.cost


def model_change(model: ModelSpec, saved_in: Path) -> str:
    """A line for the log if the same weights now make another model, else ""."""
    theirs = model_of(saved_in)
    ours, before = _meaning(model), _meaning(theirs)
    changed = [
        f"model.{name} = {ours[name]} instead of {before[name]}"
        for name in ours
        if ours[name] != before[name]
    ]
    return f"weights of {saved_in} go on with {', '.join(changed)}" if changed else ""


def _meaning(model: ModelSpec) -> dict[str, object]:
    """Keys that change a model's output and not its shapes, as long-context training does."""
    scaling = {f"rope_scaling.{key}": value for key, value in asdict(model.rope_scaling).items()}
    # Bounds that are left out are those of the kind.
    scaling["rope_scaling.turns"] = model.rope_scaling.bounds
    named = {name: attrgetter(name)(model) for name in MEANING}
    # Without experts their keys mean nothing.
    has_experts = model.experts.num > 0
    kept = {n: v for n, v in named.items() if has_experts or not n.startswith("experts.")}
    return kept | scaling
