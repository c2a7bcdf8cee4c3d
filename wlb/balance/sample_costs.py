"""What each sample costs, from any of the things that say so, as float64 whole numbers.

Most are workload models (`wlb.cost.protocol`). "slime" is the forward FLOPs of a dense model
(`slime_flops`, slime's `calculate_fwd_flops`). A number is a FLOPs ratio: attention's cost of a
sample of that many tokens equals its linear layers'.
"""

from math import frexp, ldexp

import numpy as np

from wlb.cost import Cost, model_of
from wlb.plan import IntArray, UserError
from wlb.plan.arrays import FloatArray, first_true
from wlb.spec import ModelSpec

PASSES = ("train", "forward")
WORK_BITS = 50
SEVEN_B = ModelSpec(
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    ffn_hidden_size=11008,
    vocab_size=32000,
)


def slime_flops(lengths: IntArray, model: ModelSpec = SEVEN_B) -> FloatArray:
    """Forward FLOPs of samples (tokens, shape [n]) as slime counts those of a dense model."""
    d, kv = model.hidden_size, model.num_kv_heads * model.head_size
    heads = model.num_heads * model.head_size
    weights = d * heads + 2 * d * kv + d * d + 3 * d * model.ffn_hidden_size
    linear = 2 * (model.num_layers * weights + d * model.vocab_size)
    n = lengths.astype(np.float64)
    return linear * n + 2 * model.num_layers * heads * n * n


def prices(lengths: IntArray, cost: Cost, passes: str) -> FloatArray:
    """The cost of each sample, finite and not negative; UserError with the sample otherwise.

    passes: "train" (forward and backward) or "forward" (log-probabilities), where `cost` is a model
    that tells them apart; all else prices the passes that it was made for.
    """
    if passes not in PASSES:
        raise UserError(f"passes = {passes!r} must be one of {', '.join(PASSES)}")
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
            f"cost has shape {out.shape}, and there are {lengths.size} samples; give one number a "
            f"sample"
        )
    if (i := first_true(~(np.isfinite(out) & (out >= 0)))) is not None:
        raise UserError(
            f"sample {i} of {lengths[i]} tokens costs {out[i]}; costs must be finite and at least 0"
        )
    return out


def whole(costs: FloatArray) -> FloatArray:
    """Costs as whole numbers of at least 1 whose sum float64 holds exactly.

    Ranks compare and add them without rounding, so that all find the same assignment.
    """
    total = float(costs.sum())
    if total <= 0:
        return np.ones_like(costs)
    # A power of two keeps whole costs whole where there is room, and the division exact.
    fraction, exponent = frexp(total)
    worth = ldexp(1.0, exponent - (fraction == 0.5) - (WORK_BITS - 1))
    return np.maximum(np.rint(costs / worth), 1.0)
