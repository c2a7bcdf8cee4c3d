"""Estimate the bytes that must be resident on one rank, with the longest micro-batch of a packing.

The estimate is an upper bound on tensors and on the memory that attention kernels allocate. The
allocator's gaps, NCCL's buffers and the CUDA context come on top (`wlb.memory.budget`). Activations
follow Korthikanti et al. (2022), Eq. 4, for flash attention and SwiGLU; this room's README has the
formulas.
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
"""Fraction of T that plans use if pipelines get unequal numbers of tokens.

The planner balances work, not tokens, so one pipeline may get more tokens than its share.
"""
ROWS_OF_SEGMENT = 128
"""Smallest mean number of rows of a segment in an attention call of a rank.

Kernels pad each segment by up to 128 rows, so more segments need more memory. In steps of Table 1's
lengths the mean was at least 106 rows (system `paper`) to 400 rows (system `wlb`).
"""

INPUT_BYTES = 80
"""Bytes of one row of a micro-batch besides RoPE's tables: ids, labels, positions, row indices."""
INDEX_BYTES = 8
"""Bytes of one row index (int64)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one pipeline rank. Every `*_bytes` field is a term of `total_bytes`.

    Some terms only count what exceeds another term, because their tensors never exist at the same
    time. Without FSDP (one rank, float32) the parameters are the master weights, and gradients are
    not copied.
    """

    pp_rank: int  # the pipeline rank
    num_in_flight: int  # passes whose activations are stored at the same time
    micro_batch_tokens: int  # tokens of the longest micro-batch
    # Gathered parameters in compute dtype. With `fsdp.reshard_after_forward` only the running
    # layer, the prefetched ones, embedding and head.
    parameters_bytes: int
    optimizer_bytes: int  # sharded float32 master weights and two AdamW moments
    # float32 gradients, unsharded until the last micro-batch, and their reduced shard; of the
    # stages whose first backward has run when memory peaks.
    gradients_bytes: int
    # gradients of the running layer in compute dtype, before FSDP adds them up
    fresh_gradients_bytes: int
    # Activations of all micro-batches in flight, and tensors that wait for the weight-gradient
    # pass.
    activations_bytes: int
    boundaries_bytes: int  # stage outputs stored for backward
    workspace_bytes: int  # other tensors of the running layer, including recomputed activations
    # memory that attention's backward kernel allocates, beyond the largest other workspace
    kernel_bytes: int
    # Tensors of the loss beyond workspace and kernel, because no layer runs during the loss; only
    # on the last pipeline rank.
    logits_bytes: int
    inputs_bytes: int  # token ids, labels, positions and RoPE's tables of this step and the next

    @property
    def terms(self) -> dict[str, int]:
        """Bytes by name of the field."""
        return {name: v for name, v in asdict(self).items() if name.endswith("_bytes")}

    @property
    def total_bytes(self) -> int:
        """Sum of all terms."""
        return sum(self.terms.values())


def in_flight(spec: RunSpec, *, pp_rank: int) -> int:
    """Return the most stage passes whose activations a rank stores at the same time.

    1F1B: pp - pp_rank. Interleaved: (v - 1) * round + 2 * (pp - 1 - pp_rank) passes of the warm-up,
    plus the running one. Zero-bubble: half as many of the second kind, and activations stay for
    another pp_rank * weight_delay passes. In a short step it is at most n * v.

    Args:
        spec: The run; n is its micro-batches per pipeline and v its virtual stages.
        pp_rank: The pipeline rank.
    """
    pp = spec.parallel.pp
    if not 0 <= pp_rank < pp:
        raise ValueError(f"pp_rank = {pp_rank} is outside the {pp} pipeline ranks")
    warmup, waiting = _warmup(spec, pp_rank)
    passes = spec.micro_batches_per_pipeline * spec.pp.virtual_stages
    return min(passes, warmup + 1 + waiting)


def _warmup(spec: RunSpec, pp_rank: int) -> tuple[int, int]:
    """Return a rank's warm-up and its delay of weight gradients, in passes.

    Returns:
        The forward passes before the first pair of a forward and a backward, and the input-gradient
        passes before the first weight-gradient pass.
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
    outputs: int  # stage outputs
    gradients: int  # gradients of the stages that already have some


def _held_at_once(
    spec: RunSpec, pp_rank: int, kept_bytes: list[int], waiting_bytes: list[int]
) -> set[tuple[int, int, int]]:
    """Return what a rank stores around each of its backward passes.

    The result equals the simulator's count.

    Args:
        spec: The run.
        pp_rank: The pipeline rank.
        kept_bytes: Activations of one micro-batch that forward stores, by stage.
        waiting_bytes: Tensors of one micro-batch that wait for the weight-gradient pass, by stage.

    Returns:
        Tuples (bytes of activations and waiting tensors, number of stored stage outputs, bytes of
        gradients).
    """
    stages = list(spec.stages_of(pp_rank))
    kept, waits = ([of[stage] for stage in stages] for of in (kept_bytes, waiting_bytes))
    v, n = len(stages), spec.micro_batches_per_pipeline
    group = n // max(1, n // spec.parallel.pp)
    warmup, delay = _warmup(spec, pp_rank)
    chunks = [k // group % v for k in range(n * v)]
    # Running sums over passes: begun[k] is stored by the first k forward passes, done[k] is freed
    # by the first k backward passes, and waiting[k] is what those leave for weight gradients.
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
    """Return what a rank's passes store at the peak, with micro-batches of one length.

    Args:
        spec: The run.
        pp_rank: The pipeline rank.
        micro_batch_tokens: Tokens of each micro-batch.
        most: Upper bounds of activations and of outputs in bytes; None: no bounds.
    """
    limits = most or (math.inf, math.inf)
    states = (
        HeldBytes(int(min(s.activations, limits[0])), int(min(s.outputs, limits[1])), s.gradients)
        for s in _states(spec, pp_rank, micro_batch_tokens)
    )
    return max(states, key=sum)


def most_activation_bytes(spec: RunSpec, *, pp_rank: int, micro_batch_tokens: int) -> int:
    """Return the most bytes of activations and stage outputs on a rank, without gradients."""
    return max(s.activations + s.outputs for s in _states(spec, pp_rank, micro_batch_tokens))


def _states(spec: RunSpec, pp_rank: int, tokens: int) -> Iterator[HeldBytes]:
    """Yield what a rank stores around each backward pass, with micro-batches of `tokens`."""
    kept, waiting = (
        expert_sizes.sums_by_stage(spec, partial(bytes_of, micro_batch_tokens=tokens))
        for bytes_of in (layer_activation_bytes, layer_waiting_bytes)
    )
    output = stage_output_bytes(spec, micro_batch_tokens=tokens)
    for held, n, gradients in _held_at_once(spec, pp_rank, kept, waiting):
        yield HeldBytes(held, n * output, gradients)


def stage_gradient_bytes(spec: RunSpec, *, stage: int) -> int:
    """Return the bytes of a stage's gradients on one TP rank.

    They are float32; with FSDP their reduced shard is added.
    """
    count = stage_parameters(spec, stage=stage)
    with_experts = spec.stage_expert_layers[stage]
    shard = expert_sizes.stored_parameters(spec, count, with_experts) if _has_fsdp(spec) else 0
    return FLOAT32_BYTES * (count + shard)


def layer_activation_bytes(spec: RunSpec, *, micro_batch_tokens: int) -> int:
    """Return the saved activations of one layer and micro-batch on one rank, in bytes.

    The README has the formulas.
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
            # The norms save Q and K before them; attention saves Q and K after them.
            values += model.q_dim + model.kv_dim
        # One log-sum-exp for each head, and with norms of heads one root mean square for each.
        float32_values = model.num_heads
        float32_values += model.norms_keys * (model.num_heads + model.num_kv_heads)
    if spec.training.recompute == Recompute.NONE:
        values += model.hidden_size + expert_sizes.mlp_values(model, load=load)
    if recompute == Recompute.NONE:
        float32_values += expert_sizes.z_loss_values(model)
    per_token = size * values + FLOAT32_BYTES * float32_values + order_bytes
    return local * per_token // tp


def _linear_layer_values(model: ModelSpec, *, is_cut: bool) -> tuple[int, int]:
    """Count the values of one token that autograd saves in a gated delta net.

    Compute dtype: the projections, their convolution before and after SiLU, and the gated output.
    Float32: queries, keys and values, the latter two a second time in their chunks; what chunks
    solve and read (`wlb.model.delta_rule.Chunks`); three matrices of a chunk's tokens; outputs and
    their norm; the state at the start of each chunk, and what changes it.

    Args:
        model: The model.
        is_cut: Whether ranks make summaries of their spans. All spans are then counted.

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
        # Copies of what changes a state, the changes, and both parts of the summary before each
        # chunk.
        exact += 3 * keys + 2 * linear.value_dim + state + keys * linear.key_head_dim // chunk
    return compute, exact


def layer_waiting_bytes(spec: RunSpec, *, micro_batch_tokens: int) -> int:
    """Return what a layer's input-gradient pass stores for its weight-gradient pass, in bytes.

    These are inputs and output gradients of linear layers. They are counted as what forward stores
    without recompute.
    """
    plain = _with_recompute(spec, Recompute.NONE)
    return layer_activation_bytes(plain, micro_batch_tokens=micro_batch_tokens)


def stage_output_bytes(spec: RunSpec, *, micro_batch_tokens: int) -> int:
    """Return the bytes of a stage's output of one micro-batch on one rank, sequence-sharded."""
    values = _local(spec, micro_batch_tokens) * spec.model.hidden_size
    return values * _compute_bytes(spec) // spec.parallel.tp


def workspaces_bytes(spec: RunSpec, *, micro_batch_tokens: int) -> tuple[int, int]:
    """Return what one layer needs in backward besides its activations, in bytes.

    Returns:
        Bytes of tensors (formulas: README.md), and by how many bytes attention's kernel exceeds
        them.
    """
    mlp, attention, summing, recomputed = _workspaces(spec, micro_batch_tokens)
    tensors = max(mlp, max(attention, summing) + recomputed)
    allocated = _allocated_by_kernel(spec, micro_batch_tokens)
    return tensors, max(0, attention + allocated + recomputed - tensors)


def _workspaces(spec: RunSpec, tokens: int) -> tuple[int, int, int, int]:
    """Return the workspaces of one layer's backward in bytes.

    Returns:
        The MLP's backward; attention's backward while its kernel runs; attention's backward while
        gradients of K and V are added up; and activations that are recomputed for attention's
        backward.
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
        # Gathered keys and values exist during the MLP's backward: either they were kept, or the
        # second forward pass of a fully recomputed layer has gathered them.
        kv_bytes = 2 * _model_of_ranks(spec).kv_dim * _compute_bytes(spec) // spec.parallel.tp
        mlp += (spec.parallel.cp * local + _sent_rows(spec, local)) * kv_bytes
    # The MLP's backward runs first and frees its workspace before attention's begins.
    return mlp + whole - kept, *_attention_workspaces(spec, local=local), max(0, half - kept)


def _attention_workspaces(spec: RunSpec, *, local: int) -> tuple[int, int]:
    """Return attention's tensors in backward: (while its kernel runs, while gradients add up)."""
    model, tp = _model_of_ranks(spec), spec.parallel.tp
    if model.is_all_linear:
        # Measured: gradients of the outputs, of their inputs, and of a chunk's pairs of tokens.
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
        # The call over other ranks' keys copies its queries, their outputs and gradients.
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
    """Return the rows in the send buffer of the exchange "needed", at most all ranks' rows."""
    cp, exchange = spec.parallel.cp, spec.sharding.exchange
    if cp == 1 or exchange == ExchangeChoice.GATHER:
        return 0
    return cp * local


def _copied_keys(spec: RunSpec, local: int) -> int:
    """Return the rows of keys that the segments of a rank read, each with its prefix.

    The two chunks of a document on a rank (head and tail) read at most 1 + 1 / (2 cp) documents. If
    left over tokens are distributed one by one, each is a segment with its whole prefix: at most
    two per rank.
    """
    cp, sharding = spec.parallel.cp, spec.sharding
    if cp == 1:
        return local
    rows = cp * local
    leaves_tokens = (Strategy.PER_DOCUMENT, Strategy.ADAPTIVE, Strategy.HYBRID)
    one_by_one = sharding.remainder == Remainder.ONE_BY_ONE and sharding.strategy in leaves_tokens
    return rows + -(-rows // (2 * cp)) + 2 * rows * one_by_one


def _allocated_by_kernel(spec: RunSpec, tokens: int) -> int:
    """Return the bytes that a rank's longest attention call allocates in backward.

    It is 0 in float32 (sdpa) and in layers without attention.
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
        micro_batch_tokens: Tokens of the longest micro-batch; None: what packing may make.
        step_tokens: Tokens of a step over all pipelines (T); None: unbounded.
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
    # The kind of layer that needs most counts.
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
    # The exchange "needed" has indices of the rows to send and of the gradients that return.
    indices = 2 * INDEX_BYTES * _sent_rows(spec, rows)
    return 2 * (rows * (FLOAT32_BYTES * spec.model.head_size + INPUT_BYTES) + indices)


def _has_fsdp(spec: RunSpec) -> bool:
    is_divided = spec.parallel.fsdp_size > 1 or expert_sizes.divides_experts(spec)
    return is_divided or spec.training.dtype != Dtype.FLOAT32


def loss_bytes(spec: RunSpec, pp_rank: int, tokens: int) -> int:
    """Return the bytes of the loss on the last pipeline rank; 0 on others.

    The terms are a chunk of logits in float32 (two with a soft cap) and their gradient in compute
    dtype, the rows of all TP ranks and their gradient, and the head's gradient twice.
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
    """Return how many parameters of a pipeline rank FSDP keeps gathered at the same time."""
    count = _parameters(spec, pp_rank=pp_rank)
    if not spec.fsdp.reshard_after_forward:
        return count
    stages = spec.stages_of(pp_rank)
    most = max(spec.stage_layers[stage] for stage in stages)
    at_once = min(most, 1 + LAYERS_AHEAD)
    # Layers of the largest kind are assumed to follow each other.
    of_layers = expert_sizes.sum_over(spec, stages, layer_parameters)
    largest = max(map(layer_parameters, expert_sizes.kinds_of(spec, stages)))
    return count - of_layers + min(of_layers, at_once * largest)


def _kept_bytes_of_step(spec: RunSpec, pp_rank: int, step_tokens: int) -> tuple[int, int]:
    """Return what a pipeline's whole step stores on one rank: (activations, stage outputs)."""
    dp, window = max(1, spec.parallel.dp), spec.data.context_window
    of_pipeline = step_tokens if dp == 1 else step_tokens / dp / UNEVEN_TOKENS
    stages = spec.stages_of(pp_rank)
    in_layers = expert_sizes.sum_over(spec, stages, lambda kind: most_in_layer(kind, window))
    output = stage_output_bytes(spec, micro_batch_tokens=window)
    kept = (in_layers, len(stages) * output)
    return math.ceil(of_pipeline * kept[0] / window), math.ceil(of_pipeline * kept[1] / window)


def most_in_layer(spec: RunSpec, tokens: int) -> int:
    """Return the most bytes that a layer stores for a micro-batch between its passes."""
    kept = layer_activation_bytes(spec, micro_batch_tokens=tokens)
    if not spec.splits_backward:
        return kept
    return max(kept, layer_waiting_bytes(spec, micro_batch_tokens=tokens))


def memory_estimate(
    spec: RunSpec, *, micro_batch_tokens: int | None = None, step_tokens: int | None = None
) -> MemoryEstimate:
    """Estimate the memory of the pipeline rank that needs most.

    This is mostly rank 0, which has most passes in flight. The arguments are those of
    `memory_of_rank`.
    """
    tokens = {"micro_batch_tokens": micro_batch_tokens, "step_tokens": step_tokens}
    ranks = (memory_of_rank(spec, pp_rank=r, **tokens) for r in range(spec.parallel.pp))
    return max(ranks, key=lambda estimate: estimate.total_bytes)


def longest_micro_batch(spec: RunSpec) -> int:
    """Return the tokens of the longest micro-batch that packing may make."""
    window, packing = spec.data.context_window, spec.packing
    if packing.varies_lengths:
        return spec.s_max
    windows = {Policy.CAPACITY: packing.bin_windows, Policy.EXAMPLES: packing.examples}
    return window * windows.get(packing.policy, 1)


def _local(spec: RunSpec, micro_batch_tokens: int) -> int:
    """Return the tokens of a micro-batch on one CP rank."""
    return -(-micro_batch_tokens // spec.parallel.cp)


def _model_of_ranks(spec: RunSpec) -> ModelSpec:
    """Return the model that TP ranks compute together, with copied KV heads.

    A rank's sizes are 1 / tp of it.
    """
    return spec.model.with_kv_copies(spec.parallel.tp)


def _compute_bytes(spec: RunSpec) -> int:
    return 2 if spec.training.dtype == Dtype.BFLOAT16 else FLOAT32_BYTES


def layer_parameters(spec: RunSpec) -> int:
    """Count the gathered parameters of a decoder layer on one TP rank, with one EP rank's experts.

    If the model has experts, a layer with experts is counted, as for all sizes of one layer in this
    file; `expert_sizes.sums_by_stage` sums over the different kinds of layers.
    """
    model, held = _model_of_ranks(spec), expert_sizes.experts_of_layer(spec)
    whole = model.num_layer_norm_parameters + model.hidden_size * model.experts.num
    divided = model.num_layer_parameters - whole - held * spec.parallel.ep
    return divided // spec.parallel.tp + whole + held


def stage_parameters(spec: RunSpec, *, stage: int) -> int:
    """Count the parameters of a stage on one TP rank.

    Matrices of layers are divided by tp, norms are not. The first stage has the embedding, and the
    last has the head and the last norm. A tied head is a copy of the embedding, unless one stage
    has both.
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
