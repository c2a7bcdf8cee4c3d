"""This rank's model: its pipeline stages with all wraps applied, in an order stated once, here.

1. Modules on the meta device. 2. Each parameter's tensor-parallel shard, still without storage.
3. Activation recompute of layers; it is inside FSDP's hooks, so they see one forward pass.
4. torch.compile of each layer, which traces the recompute; of attention alone, inside of it, where
there are experts. 5. FSDP2 over dp x cp. 6. Storage for this rank's shards, initialised from name
and seed, so every layout starts from the same model; not where a checkpoint's weights follow. One
whole parameter exists at a time, on the CPU: building takes the shards plus the largest parameter.
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from wlb.kernels import Scores
from wlb.kernels.fused.select import FusedChoice, choose_fused
from wlb.kernels.linear_package import choose_linear
from wlb.kernels.select import Choice, choose_backend
from wlb.model import Llama, Ops, initial_weight
from wlb.model.expert_layer import MixtureMlp
from wlb.parallel.compiled import compile_layers
from wlb.parallel.data import needs_fsdp, shard_stage, shard_start, share_streams
from wlb.parallel.deferred import DeferringOps, WeightQueue
from wlb.parallel.expert_parallel import divide_experts, is_expert, own_experts
from wlb.parallel.mesh import Mesh
from wlb.parallel.tensor import TensorParallelOps, local_tensor, placement
from wlb.parallel.tensor_op import TracedTensorParallelOps
from wlb.plan import UserError
from wlb.spec import LinearBackend, Recompute, RunSpec

# The RNG state is not preserved, because the model draws no random numbers.
_checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def compute_dtype(spec: RunSpec) -> torch.dtype:
    return torch.bfloat16 if spec.training.dtype == "bfloat16" else torch.float32


def kernel_of(spec: RunSpec, device: torch.device) -> Choice:
    """Choose the attention kernel of a run on `device`, with the reason; UserError if it cannot
    compute.
    """
    dtype, head_size = compute_dtype(spec), spec.model.head_size
    return choose_backend(
        spec.kernels.attention,
        device=device,
        dtype=dtype,
        head_size=head_size,
        deterministic=spec.kernels.deterministic,
        scores=Scores.of(spec.model, slides=spec.model.num_sliding_layers > 0),
    )


def linear_of(spec: RunSpec, device: torch.device) -> tuple[LinearBackend, str]:
    """Choose what computes the recurrence of linear layers on `device`, and the line of a run's log
    that says why; UserError if it cannot.
    """
    return choose_linear(
        spec.kernels.linear,
        device=device,
        dtype=compute_dtype(spec),
        head_size=spec.model.linear.key_head_dim,
        deterministic=spec.kernels.deterministic,
        compiled=spec.training.compile,
    )


def fused_of(spec: RunSpec, device: torch.device) -> FusedChoice:
    """Choose whether fused kernels compute a run on `device`, with the reason; UserError if they
    cannot.
    """
    return choose_fused(
        spec.kernels.fused,
        device=device,
        dtype=compute_dtype(spec),
        norm_width=spec.model.norm_width,
    )


def build_stages(spec: RunSpec, mesh: Mesh, *, draws: bool = True) -> dict[int, Llama]:
    """This rank's stages by stage index, initialised and sharded, on the mesh's device.

    draws: False leaves weights as memory was, for a caller that loads all of them from a checkpoint
    before anything reads them. A core draws about 1.2e8 values a second, of whole parameters.
    """
    if not spec.model.vocab_size:
        raise UserError("model.vocab_size is 0; take the token store's before building a model")
    assert mesh.shard_size == spec.shard_size, "the mesh was built for another fsdp.shard_size"
    copies = spec.model.kv_copies(spec.parallel.tp)
    assert (copies > 1) == (mesh.kv_heads is not None), "the mesh was built for another model"
    stages: dict[int, Llama] = {}
    for index in spec.stages_of(mesh.at.pp):
        with torch.device("meta"):
            stage = Llama(
                spec.model,
                layers=spec.layers_of(index),
                is_first=index == 0,
                is_last=index == spec.num_stages - 1,
                ops=_ops(spec, mesh),
                loss_chunk=spec.training.loss_chunk,
            )
        if mesh.parallel.tp > 1:
            _distribute(stage, mesh)
        queue = getattr(stage.ops, "queue", None)
        divide_experts(stage, mesh, queue, num_stages=spec.ep.stages)
        recompute_layers(stage, spec.training.recompute)
        if spec.training.compile:
            compile_layers(stage, spec.training.compile_backend)
        shard_stage(stage, mesh, compute_dtype(spec), spec.fsdp)
        # The storage is that of this rank's shards alone.
        stage.to_empty(device=mesh.device)
        if draws:
            for name, parameter in stage.named_parameters():
                _fill(parameter, name, spec, mesh)
        for buffer in stage.buffers():
            buffer.zero_()
        stages[index] = stage
    share_streams(stages.values())
    return stages


def recompute_layers(stage: Llama, recompute: Recompute) -> None:
    """Make backward recompute activations of each decoder layer, in place.

    FULL keeps a layer's input alone. SELECTIVE recomputes the second norm and the MLP, and keeps
    attention's tensors. In both, the down projection and its reduce-scatter do not run again:
    torch's checkpoint stops once backward has all tensors that it needs, and linear layers save
    their input before they compute (`wlb.parallel.deferred.Product`).
    """
    if recompute == Recompute.NONE:
        return
    method = "forward" if recompute == Recompute.FULL else "second_half"
    for layer in stage.model.layers.values():
        # forward is replaced inside the module, so that hooks on the module (FSDP, clock) do not
        # run again in backward.
        call = partial(_checkpointed, getattr(layer, method))
        if isinstance(layer.mlp, MixtureMlp):
            # FULL recomputes attention while gradients of the experts' outputs travel.
            passes = partial(layer.mlp.passes, whole_layer=recompute == Recompute.FULL)
            call = partial(call, context_fn=passes)
        setattr(layer, method, call)


def _ops(spec: RunSpec, mesh: Mesh) -> Ops:
    if mesh.parallel.tp > 1:
        queue = WeightQueue() if spec.splits_backward else None
        made = TracedTensorParallelOps if spec.training.compile else TensorParallelOps
        ops = made(mesh.group("tp"), spec.model.padded_vocab_size, queue)
    else:
        ops = DeferringOps() if spec.splits_backward else Ops()
    ops.fused = fused_of(spec, mesh.device).fused
    return ops


def _distribute(stage: Llama, mesh: Mesh) -> None:
    """Replace each parameter by this rank's tensor-parallel shard, a DTensor without storage."""
    for name, parameter in list(stage.named_parameters()):
        if is_expert(name):
            continue
        placed = placement(name, mesh)
        local = placed.part_of(parameter.detach()).contiguous()
        value = DTensor.from_local(local, placed.mesh, placed.placements, run_check=False)
        owner, _, leaf = name.rpartition(".")
        setattr(stage.get_submodule(owner), leaf, nn.Parameter(value))


@torch.no_grad()
def _fill(parameter: nn.Parameter, name: str, spec: RunSpec, mesh: Mesh) -> None:
    """Initialise one parameter. This is a separate function so that the whole value is freed before
    the next one is made.
    """
    if is_expert(name):
        is_sharded = needs_fsdp(mesh, compute_dtype(spec))
        own = own_experts(spec.model.experts.num, mesh, is_sharded=is_sharded)
        shape, seed = torch.Size((len(own), *parameter.shape[1:])), spec.run.seed
        if own:
            value = initial_weight(name, shape, spec.model, seed=seed, first_expert=own.start)
            local_tensor(parameter).copy_(value)
        return
    value = initial_weight(name, parameter.shape, spec.model, seed=spec.run.seed)
    if mesh.parallel.tp > 1:
        value = placement(name, mesh).part_of(value)
    local = local_tensor(parameter)
    is_sharded = needs_fsdp(mesh, compute_dtype(spec))
    start = shard_start(value.shape[0], mesh) if is_sharded else 0
    local.copy_(value[start : start + local.shape[0]])
