"""Bytes that must be resident on one rank, with the longest micro-batch packing may make.

An upper bound on tensors and on the memory that attention kernels allocate besides them. The
allocator's gaps, NCCL's buffers and the CUDA context come on top (`wlb.memory.budget`). Activations
follow Korthikanti et al. (2022), Eq. 4, for flash attention and SwiGLU; the README of this room has
the formulas.
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
DEALT_MARGIN = 0.88
"""Share of T that plans use if several pipelines get unequal numbers of tokens."""
ROWS_OF_SEGMENT = 128
"""Mean rows of a segment on a rank, at least, of an attention call: kernels pad each segment by up
to 128 rows. In steps of Table 1's lengths the mean was 106 (`paper`) to 400 (`wlb`) at least."""

INPUT_BYTES = 80
"""Of a row of a micro-batch, besides RoPE's tables: ids, labels, positions, rows to gather."""
INDEX_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of pipeline rank `pp_rank`; every `*_bytes` field is a term of `total_bytes`.

    parameters: gathered, in compute dtype (with `fsdp.reshard_after_forward` only the layer at
    work, those prefetched, embedding and head). optimizer: sharded float32 master weights and two
    AdamW moments. gradients: float32, unsharded until the last micro-batch, plus their reduced
    shard, of the stages whose first backward is over when most is held. fresh_gradients: of the
    layer at work, in compute dtype, before FSDP adds them up. Without FSDP (one rank, float32)
    parameters are the master weights; gradients are not copied. activations: of all micro-batches
    in flight, and tensors kept for the weights' pass. boundaries: stage outputs kept for backward.
    workspace: further tensors of the running layer, recomputed activations included. kernel: memory
    that attention's backward kernel allocates, as far as it exceeds the largest other workspace.
    logits: tensors of the loss, last pipeline rank only, as far as it exceeds workspace and kernel:
    no layer runs during the loss. inputs: token ids, labels, positions and RoPE's tables of a step
    and of the next one.
    """

    pp_rank: int
    num_in_flight: int
    micro_batch_tokens: int
    parameters_bytes: int
    optimizer_bytes: int
    gradients_bytes: int
    fresh_gradients_bytes: int
    activations_bytes: int
    boundaries_bytes: int
    workspace_bytes: int
    kernel_bytes: int
    logits_bytes: int
    inputs_bytes: int

    @property
    def terms(self) -> dict[str, int]:
        return {name: v for name, v in asdict(self).items() if name.endswith("_bytes")}

    @property
    def total_bytes(self) -> int:
        return sum(self.terms.values())


def in_flight(spec: RunSpec, *, pp_rank: int) -> int:
    """Peak number of stage passes whose activations rank `pp_rank` holds, at most n * v.

    1F1B: pp - pp_rank. Interleaved: (v - 1) * round + 2 * (pp - 1 - pp_rank) of the warm-up, and
    the running one. Zero-bubble: half of those hops; activations wait pp_rank * weight_delay passes
    more.
    """
    pp = spec.parallel.pp
    if not 0 <= pp_rank < pp:
        raise ValueError(f"pp_rank = {pp_rank} is outside the {pp} pipeline ranks")
    warmup, waiting = _warmup(spec, pp_rank)
    passes = spec.micro_batches_per_pipeline * spec.pp.virtual_stages
    return min(passes, warmup + 1 + waiting)


def _warmup(spec: RunSpec, pp_rank: int) -> tuple[int, int]:
    """(forward passes before the first backward's partner, inputs' passes before the first weights'
    pass) of a rank.
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
    """Bytes that passes hold on a rank: layers' activations (and what waits for the weights' pass),
    stage outputs, and gradients of the stages that have them.
    """

    activations: int
    outputs: int
    gradients: int


def _held_at_once(
    spec: RunSpec, pp_rank: int, kept_bytes: list[int], waiting_bytes: list[int]
) -> set[tuple[int, int, int]]:
    """States of a rank around its backward passes: (bytes of activations that are kept or wait for
    the weights' pass, stages with kept outputs, bytes of gradients). Equal to the simulator's
    count. kept_bytes, waiting_bytes: of a micro-batch, by stage.
    """
    stages = list(spec.stages_of(pp_rank))
    kept, waits = ([of[stage] for stage in stages] for of in (kept_bytes, waiting_bytes))
    v, n = len(stages), spec.micro_batches_per_pipeline
    group = n // max(1, n // spec.parallel.pp)
    warmup, delay = _warmup(spec, pp_rank)
    chunks = [k // group % v for k in range(n * v)]
    begun = [0, *accumulate(kept[c] for c in chunks)]
    done, waiting = ([0, *accumulate(of[v - 1 - c] for c in chunks)] for of in (kept, waits))
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
    """What a rank's passes hold when that is most; micro-batches of one length. most: bounds of
    activations and of outputs.
    """
    limits = most or (math.inf, math.inf)
    states = (
        HeldBytes(int(min(s.activations, limits[0])), int(min(s.outputs, limits[1])), s.gradients)
        for s in _states(spec, pp_rank, micro_batch_tokens)
    )
    return max(states, key=sum)


def most_activation_bytes(spec: RunSpec, *, pp_rank: int, micro_batch_tokens: int) -> int:
    """Most bytes of activations and stage outputs that a rank holds, whatever gradients exist."""
    return max(s.activations + s.outputs for s in _states(spec, pp_rank, micro_batch_tokens))


def _states(spec: RunSpec, pp_rank: int, tokens: int) -> Iterator[HeldBytes]:
    """What a rank holds around each backward pass, with micro-batches of `tokens`."""
    kept, waiting = (
        expert_sizes.sums_by_stage(spec, partial(bytes_of, micro_batch_tokens=tokens))
        for bytes_of in (layer_activation_bytes, layer_waiting_bytes)
    )
    output = stage_output_bytes(spec, micro_batch_tokens=tokens)
    for held, n, gradients in _held_at_once(spec, pp_rank, kept, waiting):
        yield HeldBytes(held, n * output, gradients)


def stage_gradient_bytes(spec: RunSpec, *, stage: int) -> int:
    """Bytes of a stage's gradients on one TP rank: float32, and with FSDP their reduced shard."""
    count = stage_parameters(spec, stage=stage)
    with_experts = spec.stage_expert_layers[stage]
    shard = expert_sizes.stored_parameters(spec, count, with_experts) if _has_fsdp(spec) else 0
    return FLOAT32_BYTES * (count + shard)


def layer_activation_bytes(spec: RunSpec, *, micro_batch_tokens: int) -> int:
    """Saved activations of one layer and micro-batch on one rank (formulas: README.md)."""
    model, tp = _model_of_ranks(spec), spec.parallel.tp
    size = _compute_bytes(spec)
    local, recompute = _local(spec, micro_batch_tokens), spec.training.recompute
    load = spec.cost.expert_load
    order_bytes = expert_sizes.order_bytes(
        model, is_recomputed=recompute != Recompute.NONE, load=load
    )
    if recompute == Recompute.FULL:
        return local * (model.hidden_size * size + order_bytes) // tp
    values = (3 + 2 * model.branch_norms) * model.hidden_size
    if model.is_all_linear:
        kept = _linear_layer_values(model, is_cut=spec.parallel.cp > 1)
        values, float32_values = values + kept[0], kept[1]
    else:
        values += 2 * model.q_dim + 2 * model.kv_dim + 2 * model.q_dim * model.attention_gate
        if model.norms_keys:
            # Q and K before their norms; K and Q after them are kept for attention.
            values += model.q_dim + model.kv_dim
        # A log-sum-exp a head, and with norms of heads a root mean square each.
        float32_values = model.num_heads
        float32_values += model.norms_keys * (model.num_heads + model.num_kv_heads)
    if spec.training.recompute == Recompute.NONE:
        values += model.hidden_size + expert_sizes.mlp_values(model, load=load)
    if recompute == Recompute.NONE:
        float32_values += expert_sizes.z_loss_values(model)
    per_token = size * values + FLOAT32_BYTES * float32_values + order_bytes
    return local * per_token // tp


def _linear_layer_values(model: ModelSpec, *, is_cut: bool) -> tuple[int, int]:
    """Values of a token that autograd keeps of a gated delta net: in compute dtype, and in float32.

    is_cut: Whether ranks make summaries of their spans; all spans are counted.

    Compute dtype: projections, their convolution before and after SiLU, and the gated output.
    Float32: queries, keys and values, the latter two once more in their chunks; what chunks solve
    and read (`wlb.model.delta_rule.Chunks`); three matrices of a chunk's tokens; outputs and their
    norm; the state that each chunk begins with, and what changes it.
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
    """Bytes that a layer's inputs' pass leaves for its weights' pass: linear layers' inputs and
    output gradients, as many as forward keeps without recompute.
    """
    plain = _with_recompute(spec, Recompute.NONE)
    return layer_activation_bytes(plain, micro_batch_tokens=micro_batch_tokens)


def stage_output_bytes(spec: RunSpec, *, micro_batch_tokens: int) -> int:
    """A stage's output of one micro-batch on one rank, sequence-sharded."""
    values = _local(spec, micro_batch_tokens) * spec.model.hidden_size
    return values * _compute_bytes(spec) // spec.parallel.tp


def workspaces_bytes(spec: RunSpec, *, micro_batch_tokens: int) -> tuple[int, int]:
    """Bytes of tensors that one layer needs in backward besides its activations (README.md), and
    their increase by the memory that attention's kernel allocates.
    """
    mlp, attention, summing, again = _workspaces(spec, micro_batch_tokens)
    tensors = max(mlp, max(attention, summing) + again)
    allocated = _allocated_by_kernel(spec, micro_batch_tokens)
    return tensors, max(0, attention + allocated + again - tensors)


def _workspaces(spec: RunSpec, tokens: int) -> tuple[int, int, int, int]:
    """Bytes of the MLP's backward; of attention's while its kernel runs and while gradients of K
    and V are added up; and of activations recomputed for attention's.
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
        # Gathered keys and values exist while the MLP's backward runs, because they were kept or
        # because the second forward pass of a fully recomputed layer has gathered them.
        kv_bytes = 2 * _model_of_ranks(spec).kv_dim * _compute_bytes(spec) // spec.parallel.tp
        mlp += (spec.parallel.cp * local + _sent_rows(spec, local)) * kv_bytes
    # The MLP's backward runs first and frees its workspace before attention's begins.
    return mlp + whole - kept, *_attention_workspaces(spec, local=local), max(0, half - kept)


def _attention_workspaces(spec: RunSpec, *, local: int) -> tuple[int, int]:
    """Attention's tensors in backward with `local` tokens a CP rank: (in the kernel, summing)."""
    model, tp = _model_of_ranks(spec), spec.parallel.tp
    if model.is_all_linear:
        # Gradients of outputs, of what they are made of and of a chunk's pairs of tokens, measured.
        values = 3 * model.linear.value_dim + model.linear.num_value_heads * CHUNK
        return local * FLOAT32_BYTES * values // tp, 0
    size = _compute_bytes(spec)
    q_bytes, kv_bytes = model.q_dim * size // tp, 2 * model.kv_dim * size // tp
    # Gradients are those of the output and of Q.
    gradients = local * 2 * q_bytes
    if spec.parallel.cp == 1:
        return gradients + local * kv_bytes, 0
    rows, copied = spec.parallel.cp * local, _copied_keys(spec, local)
    in_kernel = (rows + 2 * copied) * kv_bytes
    if spec.cp.overlap:
        # The call over others' keys has copies of its queries, their outputs and gradients.
        in_kernel += 3 * local * q_bytes
    if spec.cp.stages > 1:
        # The gradients of Q of several stages are added up in float32.
        in_kernel += local * q_bytes * FLOAT32_BYTES // size
    in_float32 = rows * kv_bytes * FLOAT32_BYTES // size
    returned = _sent_rows(spec, local) * kv_bytes * FLOAT32_BYTES // size
    # Autograd holds backward's gather until attention's backward has returned.
    summing = rows * kv_bytes + copied * kv_bytes + in_float32
    summing += max((copied + rows) * kv_bytes // 2, returned)
    return gradients + in_kernel, gradients + summing


def _sent_rows(spec: RunSpec, local: int) -> int:
    """Rows of keys in a buffer of their own while they travel by need, at most all ranks'."""
    cp, exchange = spec.parallel.cp, spec.sharding.exchange
    if cp == 1 or exchange == ExchangeChoice.GATHER:
        return 0
    return cp * local


def _copied_keys(spec: RunSpec, local: int) -> int:
    """Rows of keys that the segments of a rank read, with a prefix for each of them.

    A document's head and tail chunk read at most 1 + 1 / (2 cp) documents. Tokens that are left
    over and dealt one by one are segments of their own: at most two a rank, with whole prefixes.
    """
    cp, sharding = spec.parallel.cp, spec.sharding
    if cp == 1:
        return local
    rows = cp * local
    dealt = (Strategy.PER_DOCUMENT, Strategy.ADAPTIVE, Strategy.HYBRID)
    deals = sharding.remainder == Remainder.ONE_BY_ONE and sharding.strategy in dealt
    return rows + -(-rows // (2 * cp)) + 2 * rows * deals


def _allocated_by_kernel(spec: RunSpec, tokens: int) -> int:
    """Bytes that a rank's longest attention call allocates in backward; none in float32 (sdpa), and
    none of a layer without attention.
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
    """Memory of pipeline rank `pp_rank` with micro-batches of at most `micro_batch_tokens`.

    step_tokens: T, tokens of a step over all pipelines; None: unbounded.
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
    # By need, which rows go to which rank, and where their gradients come back.
    indices = 2 * INDEX_BYTES * _sent_rows(spec, rows)
    return 2 * (rows * (FLOAT32_BYTES * spec.model.head_size + INPUT_BYTES) + indices)


def _has_fsdp(spec: RunSpec) -> bool:
    is_divided = spec.parallel.fsdp_size > 1 or expert_sizes.divides_experts(spec)
    return is_divided or spec.training.dtype != Dtype.FLOAT32


def loss_bytes(spec: RunSpec, pp_rank: int, tokens: int) -> int:
    """Bytes of the loss on the last pipeline rank: a chunk of logits in float32 (two with a soft
    cap) and their gradient in compute dtype, the rows of all TP ranks and their gradient, the
    head's gradient twice.
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
    """Parameters of a pipeline rank that FSDP holds gathered at once."""
    count = _parameters(spec, pp_rank=pp_rank)
    if not spec.fsdp.reshard_after_forward:
        return count
    stages = spec.stages_of(pp_rank)
    most = max(spec.stage_layers[stage] for stage in stages)
    at_once = min(most, 1 + LAYERS_AHEAD)
    # Layers of the larger kind are taken to follow each other.
    of_layers = expert_sizes.sum_over(spec, stages, layer_parameters)
    largest = max(map(layer_parameters, expert_sizes.kinds_of(spec, stages)))
    return count - of_layers + min(of_layers, at_once * largest)


def _kept_bytes_of_step(spec: RunSpec, pp_rank: int, step_tokens: int) -> tuple[int, int]:
    """(activations, stages' outputs) of a pipeline's whole step on one rank."""
    dp, window = max(1, spec.parallel.dp), spec.data.context_window
    own = step_tokens if dp == 1 else step_tokens / dp / DEALT_MARGIN
    stages = spec.stages_of(pp_rank)
    in_layers = expert_sizes.sum_over(spec, stages, lambda kind: most_in_layer(kind, window))
    output = stage_output_bytes(spec, micro_batch_tokens=window)
    kept = (in_layers, len(stages) * output)
    return math.ceil(own * kept[0] / window), math.ceil(own * kept[1] / window)


def most_in_layer(spec: RunSpec, tokens: int) -> int:
    """Peak bytes that a layer keeps for a micro-batch between its passes."""
    kept = layer_activation_bytes(spec, micro_batch_tokens=tokens)
    if not spec.splits_backward:
        return kept
    return max(kept, layer_waiting_bytes(spec, micro_batch_tokens=tokens))


def memory_estimate(
    spec: RunSpec, *, micro_batch_tokens: int | None = None, step_tokens: int | None = None
) -> MemoryEstimate:
    """Estimate of the pipeline rank that needs most memory: mostly rank 0, with most passes in
    flight.
    """
    tokens = {"micro_batch_tokens": micro_batch_tokens, "step_tokens": step_tokens}
    ranks = (memory_of_rank(spec, pp_rank=r, **tokens) for r in range(spec.parallel.pp))
    return max(ranks, key=lambda estimate: estimate.total_bytes)


def longest_micro_batch(spec: RunSpec) -> int:
    """Tokens of the longest micro-batch that packing may make."""
    window, packing = spec.data.context_window, spec.packing
    if packing.varies_lengths:
        return spec.s_max
    windows = {Policy.CAPACITY: packing.bin_windows, Policy.EXAMPLES: packing.examples}
    return window * windows.get(packing.policy, 1)


def _local(spec: RunSpec, micro_batch_tokens: int) -> int:
    """Tokens of a micro-batch on a CP rank."""
    return -(-micro_batch_tokens // spec.parallel.cp)


def _model_of_ranks(spec: RunSpec) -> ModelSpec:
    """What TP ranks compute together, with copies of KV heads; a rank's sizes are 1 / tp of it."""
    return spec.model.with_kv_copies(spec.parallel.tp)


def _compute_bytes(spec: RunSpec) -> int:
    return 2 if spec.training.dtype == Dtype.BFLOAT16 else FLOAT32_BYTES


def layer_parameters(spec: RunSpec) -> int:
    """Parameters of a decoder layer on one TP rank, gathered; of experts those of an EP rank. This
    is a layer with experts if the model has any, as for all sizes of one layer here
    (`expert_sizes.sums_by_stage`).
    """
    model, held = _model_of_ranks(spec), expert_sizes.experts_of_layer(spec)
    whole = model.num_layer_norm_parameters + model.hidden_size * model.experts.num
    divided = model.num_layer_parameters - whole - held * spec.parallel.ep
    return divided // spec.parallel.tp + whole + held


def stage_parameters(spec: RunSpec, *, stage: int) -> int:
    """Parameters of a stage on one TP rank: its layers / tp (norms whole), embedding on the first
    stage, head and last norm on the last; a tied head is a copy of the embedding there unless one
    stage has both.
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
