"""Counts that prices are made of: FLOPs, values and calls of attention, of a layer and of models.

A multiply-add is two FLOPs; attention counts QK^T and PV only. Backward has two conventions:
kernel FLOPs (`attention_backward_flops`, kernel profiles) are 2.5 x forward, because a flash kernel
recomputes QK^T; model FLOPs (`document_flops`, MFU) are 2 x forward, without recomputation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from wlb.cost.protocol import BACKWARD_FLOPS_PER_PAIR, FORWARD_FLOPS_PER_PAIR, causal_pairs
from wlb.plan import FloatArray, IntArray
from wlb.spec import ExpertsSpec, ModelSpec, Recompute

LINEAR_BACKWARD_FACTOR = 2
"""Products in backward of a matrix product: the input's gradient and the weight's."""


def attention_forward_flops(
    q: IntArray, kv: IntArray, *, num_heads: int, head_dim: int
) -> IntArray:
    """Forward FLOPs of attention segments (one layer, `num_heads` query heads), shape [n]."""
    return FORWARD_FLOPS_PER_PAIR * head_dim * num_heads * causal_pairs(q, kv)


def attention_backward_flops(
    q: IntArray, kv: IntArray, *, num_heads: int, head_dim: int
) -> IntArray:
    """Backward FLOPs of a flash kernel: 2.5 x forward, recomputation included."""
    return BACKWARD_FLOPS_PER_PAIR * head_dim * num_heads * causal_pairs(q, kv)


def rank_model(model: ModelSpec, tp: int) -> ModelSpec:
    """A model whose layers have a TP rank's matrices, and norms of all tokens. Experts, whose rows
    TP divides, become one MLP as large as those that compute a token.
    """
    return replace(
        model,
        num_heads=model.num_heads // tp,
        num_kv_heads=model.with_kv_copies(tp).num_kv_heads // tp,
        head_dim=model.head_size,
        ffn_hidden_size=model.active_ffn_size // tp,
        linear=replace(
            model.linear,
            num_value_heads=model.linear.num_value_heads // tp,
            num_key_heads=max(1, model.linear.num_key_heads // tp),
        ),
        experts=ExpertsSpec(),
    )


def layer_matrices(model: ModelSpec) -> tuple[tuple[int, int], ...]:
    """(in, out) of each matrix of a decoder layer: Q, K, V, O, gate, up, down. A gate of
    attention's output counts with Q; in a linear layer the gates of output, decay and state count
    with V. Experts that compute a token count as one MLP, also for a model with experts in some
    layers only (`ModelSpec.layer_kinds`).
    """
    hidden, ffn, linear = model.hidden_size, model.active_ffn_size, model.linear
    mlp = ((hidden, ffn), (hidden, ffn), (ffn, hidden))
    if model.is_all_linear:
        gated = 2 * (linear.value_dim + linear.num_value_heads)
        keys = (hidden, linear.key_dim)
        return (keys, keys, (hidden, gated), (linear.value_dim, hidden), *mlp)
    keys = (hidden, model.kv_dim)
    return (
        (hidden, model.q_dim * (1 + model.attention_gate)),
        keys,
        keys,
        (model.q_dim, hidden),
        *mlp,
    )


CHUNK = 64
"""Tokens that the gated delta rule computes together."""


def delta_rule_flops(k_dim: int, v_dim: int) -> int:
    """Forward FLOPs of a token and head in a chunked gated delta rule.

    Three products with the state of a chunk, and five within a chunk (Yang et al. 2024, Gated Delta
    Networks, Section 3.3): K K^T, the inverse with values and with keys, Q K^T, and its values.
    """
    return 6 * k_dim * v_dim + 2 * CHUNK * (3 * k_dim + 2 * v_dim)


def recurrence_flops(model: ModelSpec) -> int:
    """Forward FLOPs of one token in a linear layer besides its matrices: its convolution and its
    gated delta rule; 0 where layers have attention.
    """
    linear = model.linear
    if not model.is_all_linear:
        return 0
    convolved = 2 * (2 * linear.key_dim + linear.value_dim) * linear.conv_kernel_dim
    rule = delta_rule_flops(linear.key_head_dim, linear.value_head_dim)
    return convolved + linear.num_value_heads * rule


def elementwise_values(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """Values that one token reads and writes in element-wise operators: (forward, backward) by
    name (`wlb.cost.Elementwise`), all norms and all additions of a layer together.

    Reads + writes forward: norms 1 + 1, residual 2 + 1, rotation 1 + 1, SwiGLU 2 + 1, embedding
    1 + 1. Backward: norms 2 + 1, residual 2 + 1, rotation 1 + 1, SwiGLU 3 + 2, embedding 2 + 1.
    Experts: a token is read once and written K times on its way, and the reverse on its way back,
    in both passes: residuals. A `query_factor` is one more rotation of Q. Norms of Q's and K's
    heads are head_norm, whose narrow rows take another time a byte; of their rows, norm. Adding
    biases (`qkv_bias`) reads and writes Q, K and V, and reads their gradients: residuals. So are
    gates of an output (3 and 5 values) and a linear layer's convolution with its SiLU (2 and 3);
    its norms of queries, keys and outputs are head_norm.
    """
    hidden, ffn, linear = model.hidden_size, model.active_ffn_size, model.linear
    routed = 2 * (1 + model.experts.per_token) * hidden * bool(model.experts.num)
    rotated = model.q_dim + model.kv_dim
    normed = model.norms_per_layer * hidden + rotated * model.qk_norm_rows
    # Multiplying queries by a factor reads and writes as rotating them does.
    rotated += model.q_dim * (model.query_factor() != 1.0)
    biased = (model.q_dim + 2 * model.kv_dim) * model.qkv_bias
    gated = model.q_dim * model.attention_gate
    forward, backward = 6 * hidden + 2 * biased + 3 * gated, 6 * hidden + biased + 5 * gated
    if model.is_all_linear:
        rotated, normed = 0, model.norms_per_layer * hidden
        mixed = 2 * linear.key_dim + linear.value_dim
        forward = 6 * hidden + 2 * mixed + 3 * linear.value_dim
        backward = 6 * hidden + 3 * mixed + 5 * linear.value_dim
    values = {
        "norm": (2 * normed, 3 * normed),
        "residual": (forward + routed, backward + routed),
        "swiglu": (3 * ffn, 5 * ffn),
        "embedding": (2 * hidden, 3 * hidden),
    }
    if rotated:
        values["rotary"] = (2 * rotated, 2 * rotated)
    heads = (model.q_dim + model.kv_dim) * model.qk_norm
    if model.is_all_linear:
        heads = 2 * linear.key_dim + linear.value_dim
    return values | ({"head_norm": (2 * heads, 3 * heads)} if heads else {})


def elementwise_calls(model: ModelSpec) -> dict[str, int]:
    """Calls of each operator of `elementwise_values` a layer and pass."""
    norms, residuals = model.norms_per_layer + 2 * model.qk_norm_rows, 2 + 3 * model.qkv_bias
    rotary = 2 + (model.query_factor() != 1.0)
    residuals += model.attention_gate
    if model.is_all_linear:
        return {"norm": model.norms_per_layer, "residual": 4, "swiglu": 1, "head_norm": 3}
    calls = {"norm": norms, "residual": residuals, "rotary": rotary, "swiglu": 1}
    return calls | ({"head_norm": 2} if model.qk_norm else {})


PLAIN_TORCH: dict[str, tuple[float, float]] = {
    "norm": (18 / 2, 34 / 3),
    "head_norm": (18 / 2, 34 / 3),
    "rotary": (10 / 2, 10 / 2),
    "swiglu": (5 / 3, 9 / 5),
}
"""Traffic of element-wise operators that torch runs one kernel at a time, over that of fused ones
(`elementwise_values`). Norms are cast to float32, squared, averaged, multiplied, cast back and
multiplied by their weight: 18 two-byte values of each one, and 34 in backward; rotations run in
float32 complex numbers: 10; SiLU and the gate's product are two kernels: 5 and 9. Additions are one
kernel in any case."""

TP_FORWARD, TP_BACKWARD = (2, 2), (4, 2)
"""All-gathers and reduce-scatters of [tokens, hidden] a layer. Backward gathers both saved inputs
again and the gradients of both outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedWork:
    """The part of a layer that backward computes again."""

    matrices: Sequence[int]  # of `layer_matrices`
    calls: dict[str, int]  # of element-wise operators
    tp: tuple[int, int]  # TP's all-gathers and reduce-scatters
    attention: bool  # whether attention runs again, with CP's gather


RECOMPUTED_WORK = {
    Recompute.NONE: RecomputedWork(matrices=range(0), calls={}, tp=(0, 0), attention=False),
    Recompute.SELECTIVE: RecomputedWork(
        matrices=range(4, 6), calls={"norm": 1, "swiglu": 1}, tp=(1, 0), attention=False
    ),
    Recompute.FULL: RecomputedWork(
        matrices=range(6),
        calls={},  # all but the last addition of a model's: `recomputed_work`
        tp=(2, 1),
        attention=True,
    ),
}
"""The executor stops before a layer's last product: down projection, its reduce-scatter and the
residual addition do not run again (`tests/parity/test_recompute.py` counts)."""


def recomputed_work(model: ModelSpec, recompute: Recompute) -> RecomputedWork:
    """What backward computes again of a layer of `model` with wlb's `training.recompute`."""
    work = RECOMPUTED_WORK[recompute]
    if recompute != Recompute.FULL:
        return work
    calls = elementwise_calls(model)
    calls |= {"residual": calls["residual"] - 1}
    if not model.branch_norms:
        return replace(work, calls=calls)
    # The last norm needs the last product, which is therefore made again.
    calls |= {"norm": calls["norm"] - 1}
    return replace(work, calls=calls, matrices=range(7), tp=TP_FORWARD)


def layer_linear_flops(model: ModelSpec) -> int:
    """Forward FLOPs of one token in one layer's matrices, a router's too, and in the recurrence of
    a linear layer; backward is twice that.
    """
    router = model.hidden_size * (model.experts.num + model.experts.shared_gate)
    matrices = sum(rows * columns for rows, columns in layer_matrices(model))
    return 2 * (router + matrices) + recurrence_flops(model)


def head_flops(model: ModelSpec) -> int:
    """Forward FLOPs of one token in the output head. The embedding is a look-up: no FLOPs.

    Counts `vocab_size`, as MFU is usually reported, not the padded vocabulary.
    """
    return 2 * model.hidden_size * model.vocab_size


def linear_flops_per_token(model: ModelSpec) -> int:
    """Model FLOPs (forward and backward) of one token outside attention, all layers and head."""
    of_layers = sum(kind.layers * layer_linear_flops(kind.model) for kind in model.layer_kinds)
    forward = head_flops(model) + of_layers
    return (1 + LINEAR_BACKWARD_FACTOR) * forward


def window_flops(model: ModelSpec, num_tokens: int, *, window: int) -> float:
    """Model FLOPs of `num_tokens` in full windows of one document each, as Megatron-LM's training
    log counts packed sequences (num_floating_point_operations with seq_length = window).
    """
    whole = float(document_flops(model, np.array([window]))[0])
    return whole * num_tokens / window


def document_flops(model: ModelSpec, lengths: IntArray) -> FloatArray:
    """Model FLOPs (forward and backward) of whole documents, for MFU; shape [n].

    Floats, because a million-token document of a large model passes 2^63; exact below 2^53.
    """
    lengths = np.asarray(lengths, np.int64)
    sliding, num_sliding = model.sliding_window, model.num_sliding_layers
    pairs = causal_pairs(lengths, lengths) * float(model.num_full_layers)
    if num_sliding:
        pairs = pairs + causal_pairs(lengths, lengths, sliding=sliding) * float(num_sliding)
    per_pair = 3 * FORWARD_FLOPS_PER_PAIR * model.q_dim
    return per_pair * pairs + linear_flops_per_token(model) * lengths.astype(np.float64)
