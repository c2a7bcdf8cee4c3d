"""The model of one rank: its pipeline stages with tensor parallelism, then FSDP.

The order of wraps, once: modules on the meta device -> each parameter's tensor-parallel part, still
without storage -> layers that backward runs again (inside FSDP's hooks, which so see one forward
pass) -> torch.compile of each layer, which traces what runs again and is inside of those hooks too
-> FSDP2 over dp x cp -> storage for this rank's shards, filled in -> pipeline stages.

A parameter's value is a function of its name and the seed, so every layout starts from the same
model. A rank computes one whole parameter at a time, on the CPU, and keeps its shard: building
takes the memory of the shards and of the largest parameter.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard

from wlb.model import Llama, Ops, initial_weight
from wlb.parallel.compiled import compile_layers
from wlb.parallel.data import local_tensor, needs_fsdp, shard_stage, shard_start
from wlb.parallel.deferred import DeferringOps, WeightQueue
from wlb.parallel.mesh import Mesh
from wlb.parallel.recompute import recompute_layers
from wlb.parallel.tensor import TensorParallelOps, placement
from wlb.parallel.tensor_op import TracedTensorParallelOps
from wlb.spec import RunSpec


def compute_dtype(spec: RunSpec) -> torch.dtype:
    return torch.bfloat16 if spec.training.dtype == "bfloat16" else torch.float32


def build_stages(spec: RunSpec, mesh: Mesh) -> dict[int, Llama]:
    """This rank's stages by stage index, initialised and sharded, on the mesh's device."""
    if not spec.model.vocab_size:
        raise ValueError("model.vocab_size is 0; take the token store's before building a model")
    assert mesh.shard_size == spec.shard_size, "the mesh was built for another fsdp.shard_size"
    stages: dict[int, Llama] = {}
    for index in spec.stages_of(mesh.pp_rank):
        # Each stage its own: a queue belongs to the stage whose backward pass is at work.
        ops = _ops(spec, mesh)
        with torch.device("meta"):
            stage = Llama(
                spec.model,
                layers=spec.layers_of(index),
                is_first=index == 0,
                is_last=index == spec.num_stages - 1,
                ops=ops,
                loss_chunk=spec.training.loss_chunk,
            )
        if mesh.tp_size > 1:
            _distribute(stage, mesh)
        recompute_layers(stage, spec.training.recompute)
        if spec.training.compile:
            compile_layers(stage, spec.training.compile_backend)
        shard_stage(stage, mesh, compute_dtype(spec), spec.fsdp)
        _initialise(stage, spec, mesh)
        stages[index] = stage
    return stages


def _ops(spec: RunSpec, mesh: Mesh) -> Ops:
    if mesh.tp_size > 1:
        queue = WeightQueue() if spec.splits_backward else None
        made = TracedTensorParallelOps if spec.training.compile else TensorParallelOps
        overlaps = spec.tp.overlap
        return made(mesh.tp_group, spec.model.padded_vocab_size, queue, overlaps=overlaps)
    return DeferringOps() if spec.splits_backward else Ops()


def _distribute(stage: Llama, mesh: Mesh) -> None:
    """This rank's tensor-parallel part of each parameter, as a DTensor without storage."""
    for name, parameter in list(stage.named_parameters()):
        how = placement(name)
        local = _part(parameter.detach(), how, mesh).contiguous()
        value = DTensor.from_local(local, mesh.tp, [how], run_check=False)
        owner, _, leaf = name.rpartition(".")
        setattr(stage.get_submodule(owner), leaf, nn.Parameter(value))


@torch.no_grad()
def _initialise(stage: Llama, spec: RunSpec, mesh: Mesh) -> None:
    """Storage for what this rank holds, filled in from one whole parameter after the other."""
    stage.to_empty(device=mesh.device)
    for name, parameter in stage.named_parameters():
        _fill(parameter, name, spec, mesh)


def _fill(parameter: nn.Parameter, name: str, spec: RunSpec, mesh: Mesh) -> None:
    value = initial_weight(name, parameter.shape, spec.model, seed=spec.run.seed)
    if mesh.tp_size > 1:
        value = _part(value, placement(name), mesh)
    local = local_tensor(parameter)
    is_sharded = needs_fsdp(mesh, compute_dtype(spec))
    start = shard_start(value.shape[0], mesh) if is_sharded else 0
    local.copy_(value[start : start + local.shape[0]])


def _part(value: torch.Tensor, how: Placement, mesh: Mesh) -> torch.Tensor:
    if isinstance(how, Shard):
        return value.chunk(mesh.tp_size, how.dim)[mesh.tp_rank]
    return value
