"""Computes the cost of each sample from any form of `cost` that `balance_step` accepts.

Most forms are turned into a workload model (`wlb.cost.protocol`). For example, a number is the
length in tokens at which attention costs as much as linear layers. The form "slime" is the forward
FLOPs of a dense model, as the framework slime computes them.
"""

from math import frexp, ldexp

import numpy as np

from wlb.cost import Cost, model_of
from wlb.plan import IntArray, UserError
from wlb.plan.arrays import FloatArray, first_true
from wlb.spec import ModelSpec

PASSES = ("train", "forward")
"""Values of the argument `passes` of `balance_step`."""
WORK_BITS = 50
"""The work of all samples, as integers, adds up to less than 2 to this power. So float64 represents
all sums exactly."""
SEVEN_B = ModelSpec(
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    ffn_hidden_size=11008,
    vocab_size=32000,
)


def slime_flops(lengths: IntArray, model: ModelSpec = SEVEN_B) -> FloatArray:
    """Return the forward FLOPs of each sample, by the formula of the framework slime.

    It is the formula of slime's `calculate_fwd_flops` for a dense model.

    Args:
        lengths: Tokens of each sample, shape [n].
        model: The model. Defaults to a 7B model.
    """
    d, kv = model.hidden_size, model.num_kv_heads * model.head_size
    heads = model.num_heads * model.head_size
    weights = d * heads + 2 * d * kv + d * d + 3 * d * model.ffn_hidden_size
    linear = 2 * (model.num_layers * weights + d * model.vocab_size)
    n = lengths.astype(np.float64)
    return linear * n + 2 * model.num_layers * heads * n * n


def prices(lengths: IntArray, cost: Cost, passes: str) -> FloatArray:
    """Return the cost of each sample, shape [n].

    Args:
        lengths: Tokens of each sample, shape [n].
        cost: Any form of cost that `balance_step` accepts.
        passes: "train" for forward and backward, or "forward" for the forward pass alone. Only a
            workload model distinguishes them.

    Raises:
        UserError: If a sample has no finite cost of at least 0.
    """
    if passes not in PASSES:
        raise UserError(f"passes = {passes!r} is unknown; use one of {', '.join(PASSES)}")
    model = model_of(cost)
    if model is not None:
        is_forward = passes == "forward"
        found = (model.forward_latency_ns if is_forward else model.workload_ns)(lengths)
    elif isinstance(cost, str):
        found = slime_flops(lengths)
    else:
        found = cost(lengths) if callable(cost) else cost
    out = np.asarray(found, np.float64)
    if out.shape != lengths.shape:
        raise UserError(
            f"cost has shape {out.shape}, but there are {lengths.size} samples; give one number "
            f"for each sample"
        )
    if (i := first_true(~(np.isfinite(out) & (out >= 0)))) is not None:
        raise UserError(
            f"the cost of sample {i}, which has {lengths[i]} tokens, is {out[i]}, but costs must "
            "be finite and at least 0; correct the argument cost"
        )
    return out


def whole(costs: FloatArray) -> FloatArray:
    """Scale and round costs to integers of at least 1 whose sums are exact in float64.

    So all ranks add and compare them without rounding errors, and find the same assignment.
    """
    total = float(costs.sum())
    if total <= 0:
        return np.ones_like(costs)
    # Divide by a power of two, which is exact, and which keeps integer costs integer if their sum
    # has less than WORK_BITS bits.
    fraction, exponent = frexp(total)
    worth = ldexp(1.0, exponent - (fraction == 0.5) - (WORK_BITS - 1))
    return np.maximum(np.rint(costs / worth), 1.0)
