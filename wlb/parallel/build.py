"""Build this rank's pipeline stages, with parallelism, recomputation, torch.compile and FSDP2.

Only this file fixes the order of these steps:

1. Make the modules on the meta device.
2. Replace each parameter by its tensor-parallel shard, still without storage. Divide the experts.
3. Wrap layers in activation recompute. FSDP's hooks are outside the recompute, so they run once per
   layer in forward and not again when backward recomputes the layer.
4. Compile each layer with torch.compile, which also traces the recompute. In layers with experts
   only attention is compiled.
5. Apply FSDP2 over dp x cp.
6. Allocate this rank's shards and initialise them from name and seed, so that every layout starts
   from the same model. This is skipped if weights are loaded from a checkpoint.

Only one whole parameter exists at a time, on the CPU, so building needs memory for the shards plus
the largest parameter.
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
    """Return the dtype in which a run computes, bfloat16 or float32."""
    return torch.bfloat16 if spec.training.dtype == "bfloat16" else torch.float32


def kernel_of(spec: RunSpec, device: torch.device) -> Choice:
    """Choose the attention kernel of a run on `device`, and say why.

    Raises:
        UserError: The configured kernel cannot compute the run.
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
    """Return the implementation of linear attention's recurrence, and a line that says why.

    Raises:
        UserError: The configured implementation cannot compute the run.
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
    """Choose whether a run on `device` uses the fused Triton kernels, and say why.

    Raises:
        UserError: The configuration demands the fused kernels, but they cannot compute the run.
    """
    return choose_fused(
        spec.kernels.fused,
        device=device,
        dtype=compute_dtype(spec),
        norm_width=spec.model.norm_width,
    )


def build_stages(spec: RunSpec, mesh: Mesh, *, draws: bool = True) -> dict[int, Llama]:
    """Build this rank's stages, initialised and sharded, on the mesh's device.

    Args:
        spec: Configuration of the run.
        mesh: The ranks.
        draws: Whether to draw initial weights. With False the weights are uninitialised memory, for
            a caller that loads all of them from a checkpoint. Every rank draws whole parameters; a
            CPU core draws about 1.2e8 values a second.

    Returns:
        The stages by their index in the pipeline.
    """
    if not spec.model.vocab_size:
        raise UserError(
            "a model cannot be built with model.vocab_size = 0; set model.vocab_size to the "
            "number of tokens in the token store's vocabulary"
        )
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
        # Allocate storage, which is now needed for this rank's shards only.
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
    """Make backward recompute activations of each decoder layer of `stage`, in place.

    FULL keeps only a layer's input. SELECTIVE recomputes the second norm and the MLP, and keeps the
    tensors that attention saves. In neither case does the recomputation run the down projection and
    its reduce-scatter: torch's checkpoint stops recomputing as soon as it has all tensors that
    backward needs, and linear layers save their input before they compute
    (`wlb.parallel.deferred.Product`).
    """
    if recompute == Recompute.NONE:
        return
    method = "forward" if recompute == Recompute.FULL else "second_half"
    for layer in stage.model.layers.values():
        # Replace the method instead of wrapping the module. The module's hooks, which FSDP and the
        # timer have added, then do not run a second time in backward.
        call = partial(_checkpointed, getattr(layer, method))
        if isinstance(layer.mlp, MixtureMlp):
            # The mixture must know what is recomputed, because with FULL the gradients of the
            # experts' outputs travel while attention is recomputed.
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
    """Replace each parameter except experts by this rank's tensor-parallel shard, a DTensor."""
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
    """Initialise this rank's part of one parameter from its name and the run's seed.

    This is a separate function so that the whole parameter's value is freed before the next one is
    made.
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
