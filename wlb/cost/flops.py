"""Count the FLOPs, memory traffic and kernel calls of attention, of a layer and of a model.

A multiply-add counts as two FLOPs. Attention counts the products QK^T and PV only, not the softmax.

Two conventions exist for the backward pass of attention:
- Kernel FLOPs (`attention_backward_flops`, used with kernel profiles) are 2.5 x forward, because a
  flash kernel recomputes QK^T.
- Model FLOPs (`document_flops`, used for MFU) are 2 x forward, because they leave out what is
  recomputed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from wlb.cost.protocol import BACKWARD_FLOPS_PER_PAIR, FORWARD_FLOPS_PER_PAIR, causal_pairs
from wlb.plan import FloatArray, IntArray
from wlb.spec import ExpertsSpec, ModelSpec, Recompute

LINEAR_BACKWARD_FACTOR = 2
"""Backward FLOPs of a matrix product over its forward FLOPs.

Backward has two products: one for the gradient of the input, and one for that of the weight.
"""


def attention_forward_flops(
    q: IntArray, kv: IntArray, *, num_heads: int, head_dim: int
) -> IntArray:
    """Count the forward FLOPs of attention segments in one layer.

    Args:
        q: Query rows of each segment, shape [n].
        kv: Keys of each segment, shape [n].
        num_heads: Number of query heads.
        head_dim: Size of a head.

    Returns:
        FLOPs of each segment, shape [n].
    """
    return FORWARD_FLOPS_PER_PAIR * head_dim * num_heads * causal_pairs(q, kv)


def attention_backward_flops(
    q: IntArray, kv: IntArray, *, num_heads: int, head_dim: int
) -> IntArray:
    """Count a flash kernel's backward FLOPs in one layer: 2.5 x forward, as it recomputes QK^T.

    Args:
        q: Query rows of each segment, shape [n].
        kv: Keys of each segment, shape [n].
        num_heads: Number of query heads.
        head_dim: Size of a head.

    Returns:
        FLOPs of each segment, shape [n].
    """
    return BACKWARD_FLOPS_PER_PAIR * head_dim * num_heads * causal_pairs(q, kv)


def rank_model(model: ModelSpec, tp: int) -> ModelSpec:
    """Return a model whose matrices have the size of one TP rank's parts of `model`'s matrices.

    The hidden size is not divided, so norms count as if the rank had the rows of all TP ranks. One
    dense MLP replaces the experts. Its size is that of a token's active experts, divided by `tp`,
    because TP divides the rows that experts compute rather than their matrices.
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
    """Return (inputs, outputs) of each matrix of a decoder layer: Q, K, V, O, gate, up, down.

    A gate of the attention output is counted with Q. In a linear-attention layer the gates of
    output, decay and state are counted with V. A token's active experts count as one MLP. If the
    layers of a model differ, call this once for the model of each entry in `ModelSpec.layer_kinds`.
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
"""Tokens in one chunk of the chunked gated delta rule."""


def delta_rule_flops(k_dim: int, v_dim: int) -> int:
    """Count the forward FLOPs of one token and head in a chunked gated delta rule.

    A token takes part in three products with the state of its chunk, and in five products within
    the chunk (Yang et al. 2024, Gated Delta Networks, Section 3.3): K K^T, the inverse matrix of
    the chunk times values and times keys, Q K^T, and Q K^T times values.

    Args:
        k_dim: Size of a key head.
        v_dim: Size of a value head.
    """
    return 6 * k_dim * v_dim + 2 * CHUNK * (3 * k_dim + 2 * v_dim)


def recurrence_flops(model: ModelSpec) -> int:
    """Count one token's forward FLOPs in a layer's convolution and gated delta rule.

    The FLOPs of the layer's weight matrices are not included. A layer without linear attention has
    0.
    """
    linear = model.linear
    if not model.is_all_linear:
        return 0
    convolved = 2 * (2 * linear.key_dim + linear.value_dim) * linear.conv_kernel_dim
    rule = delta_rule_flops(linear.key_head_dim, linear.value_head_dim)
    return convolved + linear.num_value_heads * rule


def elementwise_values(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """Count the values that one layer's element-wise operators read and write for one token.

    The table gives the reads + writes of each operator, or their sum, in vectors of the operator's
    width. Its last column names the operator whose measured throughput gives the price.

    | operator           | forward | backward | priced as         |
    |--------------------|---------|----------|-------------------|
    | norm               | 1 + 1   | 2 + 1    | norm              |
    | residual addition  | 2 + 1   | 2 + 1    | residual          |
    | rotation of Q, K   | 1 + 1   | 1 + 1    | rotary            |
    | SwiGLU             | 2 + 1   | 3 + 2    | swiglu            |
    | embedding          | 1 + 1   | 2 + 1    | embedding         |
    | biases of Q, K, V  | 1 + 1   | 1 + 0    | residual          |
    | gate of the output | 3       | 5        | residual          |
    | convolution, SiLU  | 2       | 3        | residual          |

    - Norms of each head of Q and K (`qk_norm`) are priced as head_norm, because their narrow rows
      have another throughput. Norms over all of Q and K (`qk_norm_rows`) are priced as norm.
    - With K experts per token, a token's row is read once and written K times before the experts,
      and read K times and written once after them, in both passes. This is priced as residual.
    - Multiplying queries by a `query_factor` is priced as one more rotation of Q.
    - In a linear-attention layer, norms of queries, keys and outputs are priced as head_norm.

    Returns:
        Numbers of values (forward, backward) by the name of an `Elementwise` operator. All norms of
        a layer are added up, and so are all additions.
    """
    hidden, ffn, linear = model.hidden_size, model.active_ffn_size, model.linear
    routed = 2 * (1 + model.experts.per_token) * hidden * bool(model.experts.num)
    rotated = model.q_dim + model.kv_dim
    normed = model.norms_per_layer * hidden + rotated * model.qk_norm_rows
    # Multiplying queries by a factor reads and writes as many values as rotating them.
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
    """Count the calls of each operator of `elementwise_values` in one layer and pass."""
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
"""Memory traffic of plain PyTorch's operators over that of fused kernels: (forward, backward).

The denominators are the counts of `elementwise_values`. Plain PyTorch runs one kernel for each
operation, so intermediate values go through memory:
- A norm casts to float32, squares, averages, multiplies, casts back and multiplies by its weight:
  18 two-byte values for each element in forward, and 34 in backward.
- A rotation runs in float32 complex numbers: 10 values in each pass.
- SiLU and the product with the gate are two kernels: 5 values in forward and 9 in backward.

Additions are left out, because they are one kernel in plain PyTorch too.
"""

TP_FORWARD, TP_BACKWARD = (2, 2), (4, 2)
"""(all-gathers, reduce-scatters) of [tokens, hidden] in one layer with sequence parallelism.

Backward has two more all-gathers, because it gathers both saved inputs a second time besides the
gradients of both outputs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedWork:
    """The part of a layer's forward pass that backward recomputes."""

    matrices: Sequence[int]  # positions in `layer_matrices` of the products that are recomputed
    calls: dict[str, int]  # number of recomputed calls of each element-wise operator
    tp: tuple[int, int]  # numbers of recomputed TP collectives: (all-gathers, reduce-scatters)
    attention: bool  # whether attention is recomputed, including the all-gather of its keys


RECOMPUTED_WORK = {
    Recompute.NONE: RecomputedWork(matrices=range(0), calls={}, tp=(0, 0), attention=False),
    Recompute.SELECTIVE: RecomputedWork(
        matrices=range(4, 6), calls={"norm": 1, "swiglu": 1}, tp=(1, 0), attention=False
    ),
    Recompute.FULL: RecomputedWork(
        matrices=range(6),
        calls={},  # `recomputed_work` fills this in from the model
        tp=(2, 1),
        attention=True,
    ),
}
"""What each setting of `training.recompute` recomputes.

The executor stops recomputing before a layer's last product: the down projection, its
reduce-scatter and the residual addition are not recomputed (`tests/parity/test_recompute.py` counts
them).
"""


def recomputed_work(model: ModelSpec, recompute: Recompute) -> RecomputedWork:
    """Return what backward recomputes in a layer of `model` with wlb's `training.recompute`."""
    work = RECOMPUTED_WORK[recompute]
    if recompute != Recompute.FULL:
        return work
    calls = elementwise_calls(model)
    calls |= {"residual": calls["residual"] - 1}
    if not model.branch_norms:
        return replace(work, calls=calls)
    # A norm follows the last product and needs its output, so that product is recomputed too.
    calls |= {"norm": calls["norm"] - 1}
    return replace(work, calls=calls, matrices=range(7), tp=TP_FORWARD)


def layer_linear_flops(model: ModelSpec) -> int:
    """Count the forward FLOPs of one token in one layer besides attention over keys.

    These are the FLOPs of the layer's matrices, of the router if the layer has experts, and of the
    recurrence in a linear-attention layer. Backward has twice as many FLOPs.
    """
    router = model.hidden_size * (model.experts.num + model.experts.shared_gate)
    matrices = sum(rows * columns for rows, columns in layer_matrices(model))
    return 2 * (router + matrices) + recurrence_flops(model)


def head_flops(model: ModelSpec) -> int:
    """Count the forward FLOPs of one token in the output head.

    Padding of the vocabulary is not counted, as is usual for MFU. The embedding has no FLOPs,
    because it is a look-up.
    """
    return 2 * model.hidden_size * model.vocab_size


def linear_flops_per_token(model: ModelSpec) -> int:
    """Count the model FLOPs of one token besides attention over keys, in all layers and the head.

    Forward and backward are added up.
    """
    of_layers = sum(kind.layers * layer_linear_flops(kind.model) for kind in model.layer_kinds)
    forward = head_flops(model) + of_layers
    return (1 + LINEAR_BACKWARD_FACTOR) * forward


def window_flops(model: ModelSpec, num_tokens: int, *, window: int) -> float:
    """Count a step's model FLOPs as Megatron-LM's training log does: as if windows were documents.

    Megatron-LM's num_floating_point_operations counts each sequence as one document of seq_length =
    `window` tokens, however many documents are packed into it.

    Args:
        model: The model.
        num_tokens: Tokens of the step.
        window: Tokens of a window.
    """
    whole = float(document_flops(model, np.array([window]))[0])
    return whole * num_tokens / window


def document_flops(model: ModelSpec, lengths: IntArray) -> FloatArray:
    """Count the model FLOPs (forward and backward) of whole documents, for MFU; shape [n].

    The counts are floats, because those of a document of a million tokens in a large model exceed
    2^63. Counts below 2^53 are exact.
    """
    lengths = np.asarray(lengths, np.int64)
    sliding, num_sliding = model.sliding_window, model.num_sliding_layers
    pairs = causal_pairs(lengths, lengths) * float(model.num_full_layers)
    if num_sliding:
        pairs = pairs + causal_pairs(lengths, lengths, sliding=sliding) * float(num_sliding)
    per_pair = 3 * FORWARD_FLOPS_PER_PAIR * model.q_dim
    return per_pair * pairs + linear_flops_per_token(model) * lengths.astype(np.float64)
