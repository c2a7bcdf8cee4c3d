"""Estimate the peak memory of one rank in bytes, from a run's configuration.

The estimate is an upper bound on tensors and on the memory that attention kernels allocate, for the
longest micro-batch that packing may make. It does not include the allocator's gaps, NCCL's buffers
and the CUDA context (`wlb.memory.budget`). Activations follow Korthikanti et al. (2022), Eq. 4,
with flash attention and SwiGLU; wlb/memory/README.md has the formulas.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from wlb.cost.flops import CHUNK
from wlb.memory import expert_sizes
from wlb.memory.budget import GIB as GIB
from wlb.memory.workspace import AttentionCall, most_attention_workspace_bytes
from wlb.spec import (
    Dtype,
    ExchangeChoice,
    ModelSpec,
    Policy,
    Recompute,
    Remainder,
    RunSpec,
    Schedule,
    Strategy,
)
from wlb.spec.machine import LAYERS_AHEAD

FLOAT32_BYTES = 4
UNEVEN_TOKENS = 0.88
"""Factor by which T is lowered if a step is divided over several pipelines.

The planner gives pipelines equal work rather than equal tokens, so one pipeline may get more tokens
than its share; up to 12% more were measured.
"""
ROWS_OF_SEGMENT = 128
"""Assumed mean number of query rows of a segment in an attention call.

The assumed number of segments of a call follows from it. Kernels pad each segment by up to 128
rows, so more segments need more memory. In steps of documents with the lengths of the paper's
Table 1, the mean was at least 106 rows (system `paper`) or 400 rows (system `wlb`).
"""

INPUT_BYTES = 80
"""Bytes of a token's inputs without RoPE's tables: ids, labels, positions and row indices."""
INDEX_BYTES = 8
"""Bytes of one row index (int64)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Peak memory of one rank in bytes, as terms: `total_bytes` is the sum of the `*_bytes` fields.

    The peaks of `workspace_bytes`, `kernel_bytes` and `logits_bytes` are reached at different
    moments. So the second and third of these terms count only the bytes by which they exceed the
    terms before them. Without FSDP (one rank, float32) the parameters are the master weights, and
    gradients are not copied.
    """

    pp_rank: int  # the pipeline rank
    num_in_flight: int  # passes whose activations are stored at the same time
    micro_batch_tokens: int  # tokens of the longest micro-batch
    # Gathered parameters in compute dtype. With `fsdp.reshard_after_forward` these are only the
    # running layer, the prefetched layers, the embedding and the head.
    parameters_bytes: int
    optimizer_bytes: int  # sharded float32 master weights and two AdamW moments
    # Unsharded float32 gradients, and the shard to which they are reduced. A stage's first backward
    # pass allocates them, so only stages that have run a backward pass when memory peaks count.
    gradients_bytes: int
    # Gradients of the running layer in compute dtype, before they are added to the float32 ones.
    fresh_gradients_bytes: int
    # Activations of all micro-batches in flight, and tensors that wait for the weight-gradient
    # pass.
    activations_bytes: int
    boundaries_bytes: int  # outputs of stages that are stored for backward
    workspace_bytes: int  # other tensors of the running layer, including recomputed activations
    # How many more bytes attention's backward needs than `workspace_bytes`, including the memory
    # that its kernel allocates.
    kernel_bytes: int
    # How many more bytes the loss needs than `workspace_bytes` and `kernel_bytes`. Only the excess
    # counts, because no layer runs during the loss. 0 except on the last pipeline rank.
    logits_bytes: int
    inputs_bytes: int  # token ids, labels, positions and RoPE's tables of this step and the next

    @property
    def terms(self) -> dict[str, int]:
        """The parts of the estimate: bytes by name of the field."""
        return {name: v for name, v in asdict(self).items() if name.endswith("_bytes")}

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts of the estimate together."""
        return sum(self.terms.values())


def in_flight(spec: RunSpec, *, pp_rank: int) -> int:
    """Return the largest number of forward passes whose activations a rank stores at one time.

    A rank has n micro-batches and v virtual stages, and interleaved schedules run micro-batches in
    rounds of m (`wlb.simulate.order`). The result is the smaller of n * v and this number:

    - 1F1B: pp - pp_rank.
    - Interleaved 1F1B: the (v - 1) * m + 2 * (pp - 1 - pp_rank) passes of the warm-up, plus 1.
    - Zero-bubble: the (v - 1) * m + pp - 1 - pp_rank passes of the warm-up, plus 1, plus
      pp_rank * weight_delay passes that wait for their weight-gradient passes.

    Args:
        spec: The run.
        pp_rank: The pipeline rank.
    """
    pp = spec.parallel.pp
    if not 0 <= pp_rank < pp:
        raise ValueError(f"pp_rank = {pp_rank} must be from 0 to {pp - 1} (parallel.pp = {pp})")
    warmup, waiting = _warmup(spec, pp_rank)
    passes = spec.micro_batches_per_pipeline * spec.pp.virtual_stages
    return min(passes, warmup + 1 + waiting)


def _warmup(spec: RunSpec, pp_rank: int) -> tuple[int, int]:
    """Return the length of a rank's warm-up, and the delay of its weight-gradient passes.

    Returns:
        The number of forward passes before forward and backward passes alternate, and the number of
        input-gradient passes before the first weight-gradient pass.
    """
    pp, v, n = spec.parallel.pp, spec.pp.virtual_stages, spec.micro_batches_per_pipeline
    after = pp - 1 - pp_rank
    first_chunks = (v - 1) * (n // max(1, n // pp))
    match spec.pp.schedule:
        case _ if pp == 1:
            return 0, 0
        case Schedule.ONE_F_ONE_B:
            return after, 0
        case Schedule.INTERLEAVED_1F1B:
            return first_chunks + 2 * after, 0
        case Schedule.INTERLEAVED_ZERO_BUBBLE:
            return first_chunks + after, pp_rank * spec.pp.weight_delay


class HeldBytes(NamedTuple):
    """Bytes that a rank stores between passes."""

    activations: int  # activations of layers, and tensors that wait for the weight-gradient pass
    outputs: int  # outputs of stages
    gradients: int  # parameter gradients of the stages that have already run a backward pass


def _held_at_once(
    spec: RunSpec, pp_rank: int, kept_bytes: list[int], waiting_bytes: list[int]
) -> set[tuple[int, int, int]]:
    """Return how many bytes a rank stores at each moment at which memory may peak.

    These moments are the beginnings of the rank's backward passes, and the end of the step. If
    backward is split, the ends of the input-gradient passes are moments too. This function
    calculates how many passes have run at each moment. The simulator counts the same bytes from its
    list of passes (`wlb.simulate.peak_memory`).

    Args:
        spec: The run.
        pp_rank: The pipeline rank.
        kept_bytes: For each stage, the bytes of activations that the forward pass of one
            micro-batch stores.
        waiting_bytes: For each stage, the bytes of the tensors of one micro-batch that wait for the
            weight-gradient pass.

    Returns:
        For each moment, (bytes of activations and waiting tensors, number of stored stage outputs,
        bytes of gradients). The result is a set, so equal moments are in it once.
    """
    stages = list(spec.stages_of(pp_rank))
    kept, waits = ([of[stage] for stage in stages] for of in (kept_bytes, waiting_bytes))
    v, n = len(stages), spec.micro_batches_per_pipeline
    group = n // max(1, n // spec.parallel.pp)
    warmup, delay = _warmup(spec, pp_rank)
    chunks = [k // group % v for k in range(n * v)]
    # Running sums in bytes over the first k passes. Forward passes store begun[k]. Backward passes
    # free done[k], and leave waiting[k] for the weight-gradient passes.
    begun = [0, *accumulate(kept[c] for c in chunks)]
    done, waiting = ([0, *accumulate(of[v - 1 - c] for c in chunks)] for of in (kept, waits))
    # The first backward pass of a stage allocates its gradients.
    made = [stage_gradient_bytes(spec, stage=stage) for stage in stages]
    gradients = [
        0,
        *accumulate(made[v - 1 - c] * (chunks.index(c) == k) for k, c in enumerate(chunks)),
    ]
    out = {(0, 0, gradients[-1])}
    for k in range(n * v):
        forward = min(warmup + 1 + k, n * v)
        if not spec.splits_backward:
            out.add((begun[forward] - done[k], forward - k, gradients[k]))
            continue
        weights = max(0, k - delay)
        for back in (k, k + 1):
            held = begun[forward] - done[back] + waiting[back] - waiting[weights]
            out.add((held, forward - back, gradients[weights]))
    return out


def held_bytes(
    spec: RunSpec, *, pp_rank: int, micro_batch_tokens: int, most: tuple[int, int] | None = None
) -> HeldBytes:
    """Return what a rank stores when memory peaks, if all micro-batches are equally long.

    Args:
        spec: The run.
        pp_rank: The pipeline rank.
        micro_batch_tokens: Tokens of each micro-batch.
        most: Upper bounds of (bytes of activations, bytes of stage outputs), for example because
            the tokens of a step are limited. None means that there are no bounds.
    """
    limits = most or (math.inf, math.inf)
    states = (
        HeldBytes(int(min(s.activations, limits[0])), int(min(s.outputs, limits[1])), s.gradients)
        for s in _states(spec, pp_rank, micro_batch_tokens)
    )
    return max(states, key=sum)


def most_activation_bytes(spec: RunSpec, *, pp_rank: int, micro_batch_tokens: int) -> int:
    """Return the peak bytes of activations and stage outputs that a rank stores between passes.

    Gradients are not counted, and all micro-batches are assumed to be equally long.

    Args:
        spec: The run.
        pp_rank: The pipeline rank.
        micro_batch_tokens: Tokens of each micro-batch.
    """
    return max(s.activations + s.outputs for s in _states(spec, pp_rank, micro_batch_tokens))


def _states(spec: RunSpec, pp_rank: int, tokens: int) -> Iterator[HeldBytes]:
    """Yield what a rank stores at each moment at which memory may peak (`_held_at_once`).

    Args:
        spec: The run.
        pp_rank: The pipeline rank.
        tokens: Tokens of each micro-batch on all CP ranks together.
    """
    kept, waiting = (
        expert_sizes.sums_by_stage(spec, partial(bytes_of, micro_batch_tokens=tokens))
        for bytes_of in (layer_activation_bytes, layer_waiting_bytes)
    )
    output = stage_output_bytes(spec, micro_batch_tokens=tokens)
    for held, n, gradients in _held_at_once(spec, pp_rank, kept, waiting):
        yield HeldBytes(held, n * output, gradients)


def stage_gradient_bytes(spec: RunSpec, *, stage: int) -> int:
    """Return the bytes of a stage's float32 gradients on one TP rank.

    With FSDP the result includes the shard to which the gradients are reduced.
    """
    count = stage_parameters(spec, stage=stage)
    with_experts = spec.stage_expert_layers[stage]
    shard = expert_sizes.stored_parameters(spec, count, with_experts) if _has_fsdp(spec) else 0
    return FLOAT32_BYTES * (count + shard)


def layer_activation_bytes(spec: RunSpec, *, micro_batch_tokens: int) -> int:
    """Return the bytes of activations that one layer saves for one micro-batch on one rank.

    wlb/memory/README.md has the formulas.

    Args:
        spec: A run whose layers are all equal (`expert_sizes.layer_kinds`).
        micro_batch_tokens: Tokens of the micro-batch on all CP ranks.
    """
    model, tp = _model_of_ranks(spec), spec.parallel.tp
    size = _compute_bytes(spec)
    local, recompute = _local(spec, micro_batch_tokens), spec.training.recompute
    load = spec.cost.expert_load
    order_bytes = expert_sizes.order_bytes(
        model, is_recomputed=recompute != Recompute.NONE, load=load
    )
    # Full recompute saves the layer's input only.
    if recompute == Recompute.FULL:
        return local * (model.hidden_size * size + order_bytes) // tp
    values = (3 + 2 * model.branch_norms) * model.hidden_size
    if model.is_all_linear:
        kept = _linear_layer_values(model, is_cut=spec.parallel.cp > 1)
        values, float32_values = values + kept[0], kept[1]
    else:
        values += 2 * model.q_dim + 2 * model.kv_dim + 2 * model.q_dim * model.attention_gate
        if model.norms_keys:
            # The QK norm saves its inputs, and attention saves the normalised Q and K.
            values += model.q_dim + model.kv_dim
        # Attention saves one log-sum-exp for each head, and a QK norm saves one root mean square
        # for each head.
        float32_values = model.num_heads
        float32_values += model.norms_keys * (model.num_heads + model.num_kv_heads)
    if spec.training.recompute == Recompute.NONE:
        values += model.hidden_size + expert_sizes.mlp_values(model, load=load)
    if recompute == Recompute.NONE:
        float32_values += expert_sizes.z_loss_values(model)
    per_token = size * values + FLOAT32_BYTES * float32_values + order_bytes
    return local * per_token // tp


def _linear_layer_values(model: ModelSpec, *, is_cut: bool) -> tuple[int, int]:
    """Count the values of one token that autograd saves in a gated delta net (linear attention).

    - In compute dtype: the projections, their convolution before and after SiLU, and the gated
      output.
    - In float32: queries, keys and values, and keys and values once more in chunks; the tensors of
      `wlb.model.delta_rule.Chunks`; three matrices over pairs of a chunk's tokens; the outputs and
      their norm; the state at the start of each chunk and the tensors that update it.

    Args:
        model: The model.
        is_cut: Whether CP ranks make summaries of their spans. Summaries need further tensors,
            which are then counted for all tokens.

    Returns:
        Values in compute dtype, and values in float32.
    """
    linear, chunk = model.linear, CHUNK
    mixed = 2 * linear.key_dim + linear.value_dim
    heads, keys = linear.num_value_heads, linear.num_value_heads * linear.key_head_dim
    state = keys * linear.value_head_dim // chunk
    compute = 3 * mixed + 3 * linear.value_dim
    exact = mixed + 11 * keys + 11 * linear.value_dim + 4 * heads * chunk + 4 * state
    if is_cut:
        # Summaries need copies of the tensors that update a state, the updates themselves, and for
        # each chunk the summary (transition and state) of all tokens before it.
        exact += 3 * keys + 2 * linear.value_dim + state + keys * linear.key_head_dim // chunk
    return compute, exact


def layer_waiting_bytes(spec: RunSpec, *, micro_batch_tokens: int) -> int:
    """Return the bytes that a layer's input-gradient pass stores for its weight-gradient pass.

    The stored tensors are the inputs of linear layers and the gradients of their outputs. They are
    assumed to take as many bytes as the activations that forward would save without recompute.

    Args:
        spec: The run.
        micro_batch_tokens: Tokens of the micro-batch on all CP ranks.
    """
    plain = _with_recompute(spec, Recompute.NONE)
    return layer_activation_bytes(plain, micro_batch_tokens=micro_batch_tokens)


def stage_output_bytes(spec: RunSpec, *, micro_batch_tokens: int) -> int:
    """Return the bytes of a stage's output for one micro-batch on one rank.

    The output is sharded over TP ranks along the sequence.

    Args:
        spec: The run.
        micro_batch_tokens: Tokens of the micro-batch on all CP ranks.
    """
    values = _local(spec, micro_batch_tokens) * spec.model.hidden_size
    return values * _compute_bytes(spec) // spec.parallel.tp


def workspaces_bytes(spec: RunSpec, *, micro_batch_tokens: int) -> tuple[int, int]:
    """Return the bytes that one layer needs in backward besides its saved activations.

    Args:
        spec: The run.
        micro_batch_tokens: Tokens of the micro-batch on all CP ranks.

    Returns:
        The peak of tensors during the layer's backward (wlb/memory/README.md has the formulas), and
        by how many bytes the peak is higher if the memory that attention's kernel allocates counts
        as well.
    """
    mlp, attention, summing, recomputed = _workspaces(spec, micro_batch_tokens)
    tensors = max(mlp, max(attention, summing) + recomputed)
    allocated = _allocated_by_kernel(spec, micro_batch_tokens)
    return tensors, max(0, attention + allocated + recomputed - tensors)


def _workspaces(spec: RunSpec, tokens: int) -> tuple[int, int, int, int]:
    """Return how many bytes of temporary tensors one layer needs in its backward.

    Args:
        spec: The run.
        tokens: Tokens of the micro-batch on all CP ranks.

    Returns:
        The bytes during the MLP's backward, while attention's kernel runs, and while the gradients
        of K and V are added up. Then the bytes of recomputed activations, which must be added to
        the second and to the third number.
    """
    local = _local(spec, tokens)
    load = spec.cost.expert_load
    hidden = expert_sizes.hidden_values(spec.model, load=load)
    values = 2 * spec.model.hidden_size + 3 * hidden // spec.parallel.tp
    values += expert_sizes.exchanged_values(spec.model, load=load) // spec.parallel.tp
    mlp = local * _compute_bytes(spec) * values
    kept, half, whole = (
        layer_activation_bytes(_with_recompute(spec, recompute), micro_batch_tokens=tokens)
        for recompute in (spec.training.recompute, Recompute.SELECTIVE, Recompute.NONE)
    )
    if spec.parallel.cp > 1 and not spec.model.is_all_linear:
        # Keys and values of all ranks exist during the MLP's backward. Either they travel at this
        # time to be ready for attention's backward, or full recompute has gathered them.
        kv_bytes = 2 * _model_of_ranks(spec).kv_dim * _compute_bytes(spec) // spec.parallel.tp
        mlp += (spec.parallel.cp * local + _sent_rows(spec, local)) * kv_bytes
    # The MLP's backward runs first and frees its workspace before attention's begins.
    return mlp + whole - kept, *_attention_workspaces(spec, local=local), max(0, half - kept)


def _attention_workspaces(spec: RunSpec, *, local: int) -> tuple[int, int]:
    """Return the bytes of tensors that attention's backward needs besides saved activations.

    Args:
        spec: The run.
        local: Tokens of the micro-batch on one CP rank.

    Returns:
        (bytes while attention's kernel runs, bytes while gradients of K and V are added up).
    """
    model, tp = _model_of_ranks(spec), spec.parallel.tp
    if model.is_all_linear:
        # Measured memory consists of these gradients: those of the outputs and of their inputs, and
        # those of the matrices over pairs of a chunk's tokens.
        values = 3 * model.linear.value_dim + model.linear.num_value_heads * CHUNK
        return local * FLOAT32_BYTES * values // tp, 0
    size = _compute_bytes(spec)
    q_bytes, kv_bytes = model.q_dim * size // tp, 2 * model.kv_dim * size // tp
    # Gradients of the output and of Q.
    gradients = local * 2 * q_bytes
    if spec.parallel.cp == 1:
        return gradients + local * kv_bytes, 0
    rows, copied = spec.parallel.cp * local, _copied_keys(spec, local)
    in_kernel = (rows + 2 * copied) * kv_bytes
    if spec.cp.overlap:
        # The attention call over other ranks' keys copies its queries, its outputs and the
        # outputs' gradients: three tensors of one size.
        in_kernel += 3 * local * q_bytes
    if spec.cp.stages > 1:
        # Q's gradients from several stages are added up in float32.
        in_kernel += local * q_bytes * FLOAT32_BYTES // size
    in_float32 = rows * kv_bytes * FLOAT32_BYTES // size
    returned = _sent_rows(spec, local) * kv_bytes * FLOAT32_BYTES // size
    # Autograd keeps backward's gathered keys until attention's backward has returned.
    summing = rows * kv_bytes + copied * kv_bytes + in_float32
    summing += max((copied + rows) * kv_bytes // 2, returned)
    return gradients + in_kernel, gradients + summing


def _sent_rows(spec: RunSpec, local: int) -> int:
    """Return the most rows in the send buffer of the exchange "needed" on one CP rank.

    The buffer has most rows if each of the CP ranks needs all rows of this rank. The result is 0
    for the exchange "gather", which has no send buffer.

    Args:
        spec: The run.
        local: Tokens of the micro-batch on one CP rank.
    """
    cp, exchange = spec.parallel.cp, spec.sharding.exchange
    if cp == 1 or exchange == ExchangeChoice.GATHER:
        return 0
    return cp * local


def _copied_keys(spec: RunSpec, local: int) -> int:
    """Return an upper limit on the keys of a CP rank's segments, summed over the segments.

    A segment reads all keys of its document up to its own end. With per-document sharding a rank
    has an early and a late chunk of each document, whose keys add up to at most 1 + 1 / (2 cp)
    times the document. Tokens that are left over after dividing a document may be distributed one
    by one. Each such token is then a segment too, and a rank gets at most two of them.

    Args:
        spec: The run.
        local: Tokens of the micro-batch on one CP rank.
    """
    cp, sharding = spec.parallel.cp, spec.sharding
    if cp == 1:
        return local
    rows = cp * local
    leaves_tokens = (Strategy.PER_DOCUMENT, Strategy.ADAPTIVE, Strategy.HYBRID)
    one_by_one = sharding.remainder == Remainder.ONE_BY_ONE and sharding.strategy in leaves_tokens
    return rows + -(-rows // (2 * cp)) + 2 * rows * one_by_one


def _allocated_by_kernel(spec: RunSpec, tokens: int) -> int:
    """Return the bytes that attention's kernel allocates in backward for a rank's longest call.

    The result is 0 in float32, where the kernel is sdpa, and for layers without attention.

    Args:
        spec: The run.
        tokens: Tokens of the micro-batch on all CP ranks.
    """
    if spec.training.dtype == Dtype.FLOAT32 or spec.model.is_all_linear:
        return 0
    model, tp, local = _model_of_ranks(spec), spec.parallel.tp, _local(spec, tokens)
    keys = _copied_keys(spec, local)
    call = AttentionCall(
        num_segments=max(1, local // ROWS_OF_SEGMENT),
        num_queries=local,
        num_keys=keys,
        max_q=local,
        max_k=min(keys, spec.data.context_window),
        num_heads=model.num_heads // tp,
        num_kv_heads=model.num_kv_heads // tp,
        head_size=model.head_size,
        value_bytes=_compute_bytes(spec),
        is_causal=spec.parallel.cp == 1 or not spec.cp.overlap,
    )
    return most_attention_workspace_bytes(
        spec.kernels.attention, call, deterministic=spec.kernels.deterministic
    )


def _with_recompute(spec: RunSpec, recompute: Recompute) -> RunSpec:
    return replace(spec, training=replace(spec.training, recompute=recompute))


def memory_of_rank(
    spec: RunSpec,
    *,
    pp_rank: int,
    micro_batch_tokens: int | None = None,
    step_tokens: int | None = None,
) -> MemoryEstimate:
    """Estimate the memory of one pipeline rank.

    Args:
        spec: The run.
        pp_rank: The pipeline rank.
        micro_batch_tokens: Tokens of the longest micro-batch; None means the most that packing
            allows.
        step_tokens: Most tokens of a step over all pipelines (T); None means no limit.
    """
    size = _compute_bytes(spec)
    tokens = longest_micro_batch(spec) if micro_batch_tokens is None else micro_batch_tokens
    parameters = _parameters(spec, pp_rank=pp_rank)
    with_experts = sum(spec.stage_expert_layers[stage] for stage in spec.stages_of(pp_rank))
    shard = expert_sizes.stored_parameters(spec, parameters, with_experts)
    kinds = expert_sizes.kinds_of(spec, spec.stages_of(pp_rank))
    has_fsdp = _has_fsdp(spec)
    most = None if step_tokens is None else _kept_bytes_of_step(spec, pp_rank, step_tokens)
    held = held_bytes(spec, pp_rank=pp_rank, micro_batch_tokens=tokens, most=most)
    # Layers run one after the other, so only the kind of layer with the largest workspace counts.
    workspace, kernel = max(
        (workspaces_bytes(k, micro_batch_tokens=tokens) for k in kinds), key=sum
    )
    return MemoryEstimate(
        pp_rank=pp_rank,
        num_in_flight=in_flight(spec, pp_rank=pp_rank),
        micro_batch_tokens=tokens,
        parameters_bytes=(_gathered(spec, pp_rank) if has_fsdp else parameters) * size,
        optimizer_bytes=(2 + has_fsdp) * FLOAT32_BYTES * shard,
        gradients_bytes=held.gradients,
        fresh_gradients_bytes=has_fsdp * size * max(map(layer_parameters, kinds)),
        activations_bytes=held.activations,
        boundaries_bytes=held.outputs,
        workspace_bytes=workspace,
        kernel_bytes=kernel,
        logits_bytes=max(0, loss_bytes(spec, pp_rank, tokens) - workspace - kernel),
        inputs_bytes=_inputs(spec, step_tokens),
    )


def _inputs(spec: RunSpec, step_tokens: int | None) -> int:
    limit = step_tokens or spec.packing.step_tokens_of(spec.tokens_per_step)
    tokens = limit or spec.num_micro_batches * longest_micro_batch(spec)
    rows = -(-tokens // (max(1, spec.parallel.dp) * spec.parallel.cp))
    # The exchange "needed" stores indices of the rows to send and of the gradients that return.
    indices = 2 * INDEX_BYTES * _sent_rows(spec, rows)
    return 2 * (rows * (FLOAT32_BYTES * spec.model.head_size + INPUT_BYTES) + indices)


def _has_fsdp(spec: RunSpec) -> bool:
    is_divided = spec.parallel.fsdp_size > 1 or expert_sizes.divides_experts(spec)
    return is_divided or spec.training.dtype != Dtype.FLOAT32


def loss_bytes(spec: RunSpec, pp_rank: int, tokens: int) -> int:
    """Return the bytes of the head's and the loss's tensors; 0 except on the last pipeline rank.

    The tensors are:
    - a chunk of logits in float32 (two copies with a soft cap), and its gradient in compute dtype
    - the hidden vectors, gathered over TP ranks, and their gradient
    - the gradient of the head's weight, once in compute dtype and once in float32

    Args:
        spec: The run.
        pp_rank: The pipeline rank.
        tokens: Tokens of the micro-batch on all CP ranks.
    """
    if pp_rank < spec.parallel.pp - 1:
        return 0
    tp, size, width = spec.parallel.tp, _compute_bytes(spec), spec.model.hidden_size
    rows, vocabulary = _local(spec, tokens), spec.model.padded_vocab_size // tp
    num_float32 = 1 + (spec.model.logit_softcap > 0)
    of_value = size + num_float32 * FLOAT32_BYTES
    of_chunk = min(spec.training.loss_chunk, rows) * vocabulary * of_value
    return (
        of_chunk
        + rows * width * size * (1 + (tp > 1))
        + vocabulary * width * (size + FLOAT32_BYTES)
    )


def _gathered(spec: RunSpec, pp_rank: int) -> int:
    """Return the most parameters of a pipeline rank that FSDP keeps gathered at the same time."""
    count = _parameters(spec, pp_rank=pp_rank)
    if not spec.fsdp.reshard_after_forward:
        return count
    stages = spec.stages_of(pp_rank)
    most = max(spec.stage_layers[stage] for stage in stages)
    at_once = min(most, 1 + LAYERS_AHEAD)
    # The gathered layers are assumed to be all of the largest kind.
    of_layers = expert_sizes.sum_over(spec, stages, layer_parameters)
    largest = max(map(layer_parameters, expert_sizes.kinds_of(spec, stages)))
    return count - of_layers + min(of_layers, at_once * largest)


def _kept_bytes_of_step(spec: RunSpec, pp_rank: int, step_tokens: int) -> tuple[int, int]:
    """Return the bytes that one rank would store for all micro-batches of a step at the same time.

    Passes in flight cannot store more than this, however long single micro-batches are.

    Args:
        spec: The run.
        pp_rank: The pipeline rank.
        step_tokens: Most tokens of a step over all pipelines.

    Returns:
        Bytes of activations, and bytes of stage outputs.
    """
    dp, window = max(1, spec.parallel.dp), spec.data.context_window
    of_pipeline = step_tokens if dp == 1 else step_tokens / dp / UNEVEN_TOKENS
    stages = spec.stages_of(pp_rank)
    in_layers = expert_sizes.sum_over(spec, stages, lambda kind: most_in_layer(kind, window))
    output = stage_output_bytes(spec, micro_batch_tokens=window)
    kept = (in_layers, len(stages) * output)
    return math.ceil(of_pipeline * kept[0] / window), math.ceil(of_pipeline * kept[1] / window)


def most_in_layer(spec: RunSpec, tokens: int) -> int:
    """Return the most bytes that a layer stores for one micro-batch between its passes.

    Args:
        spec: The run.
        tokens: Tokens of the micro-batch on all CP ranks.
    """
    kept = layer_activation_bytes(spec, micro_batch_tokens=tokens)
    if not spec.splits_backward:
        return kept
    return max(kept, layer_waiting_bytes(spec, micro_batch_tokens=tokens))


def memory_estimate(
    spec: RunSpec, *, micro_batch_tokens: int | None = None, step_tokens: int | None = None
) -> MemoryEstimate:
    """Estimate the memory of the pipeline rank that needs most.

    This is mostly rank 0, because it has the most passes in flight.

    Args:
        spec: The run.
        micro_batch_tokens: Tokens of the longest micro-batch; None means the most that packing
            allows.
        step_tokens: Most tokens of a step over all pipelines (T); None means no limit.
    """
    tokens = {"micro_batch_tokens": micro_batch_tokens, "step_tokens": step_tokens}
    ranks = (memory_of_rank(spec, pp_rank=r, **tokens) for r in range(spec.parallel.pp))
    return max(ranks, key=lambda estimate: estimate.total_bytes)


def longest_micro_batch(spec: RunSpec) -> int:
    """Return the most tokens that a micro-batch may have with the run's packing policy."""
    window, packing = spec.data.context_window, spec.packing
    if packing.varies_lengths:
        return spec.s_max
    windows = {Policy.CAPACITY: packing.bin_windows, Policy.EXAMPLES: packing.examples}
    return window * windows.get(packing.policy, 1)


def _local(spec: RunSpec, micro_batch_tokens: int) -> int:
    """Return how many tokens of a micro-batch one CP rank has, rounded up."""
    return -(-micro_batch_tokens // spec.parallel.cp)


def _model_of_ranks(spec: RunSpec) -> ModelSpec:
    """Return the model with so many KV heads that each TP rank has an equal number.

    If the model has fewer KV heads than there are TP ranks, the result has copies of its KV heads.
    Sizes of the result, divided by tp, are those of one TP rank.
    """
    return spec.model.with_kv_copies(spec.parallel.tp)


def _compute_bytes(spec: RunSpec) -> int:
    return 2 if spec.training.dtype == Dtype.BFLOAT16 else FLOAT32_BYTES


def layer_parameters(spec: RunSpec) -> int:
    """Count the unsharded parameters of a decoder layer on one TP rank, with one EP rank's experts.

    If only some layers of the model have experts, a layer with experts is counted. This holds for
    all functions of this file that return a size of one layer. `expert_sizes.sums_by_stage` calls
    such a function once for each kind of layer.
    """
    model, held = _model_of_ranks(spec), expert_sizes.experts_of_layer(spec)
    whole = model.num_layer_norm_parameters + model.hidden_size * model.experts.num
    divided = model.num_layer_parameters - whole - held * spec.parallel.ep
    return divided // spec.parallel.tp + whole + held


def stage_parameters(spec: RunSpec, *, stage: int) -> int:
    """Count the unsharded parameters of a stage on one TP rank.

    Matrices of layers are divided by tp, norms are not. The first stage has the embedding, and the
    last stage has the head and the final norm. If head and embedding are tied, the last stage has a
    copy of the embedding, unless there is only one stage.
    """
    model, tp = spec.model, spec.parallel.tp
    count = expert_sizes.sum_over(spec, [stage], layer_parameters)
    vocabulary = model.padded_vocab_size * model.hidden_size // tp
    if stage == 0:
        count += vocabulary
    if stage == spec.num_stages - 1:
        has_head = not model.tied_embeddings or spec.num_stages > 1
        count += vocabulary * has_head + model.hidden_size
    return count


def _parameters(spec: RunSpec, *, pp_rank: int) -> int:
    return sum(stage_parameters(spec, stage=stage) for stage in spec.stages_of(pp_rank))
