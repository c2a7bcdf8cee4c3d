"""Most activations that a pipeline rank holds at once, from the order of its passes.

Forward keeps a stage's activations and its output; backward frees both. Where backward is split,
the inputs' pass frees the output, and what waits for the weights' pass (inputs of linear layers and
gradients of their outputs) is as large as what was kept, so that it is freed there.
"""

from collections.abc import Sequence

import numpy as np

from wlb.cost import memory_of_rank
from wlb.cost.memory import MemoryEstimate, layer_activation_bytes
from wlb.cost.profile import DTYPE_BYTES
from wlb.plan import IntArray
from wlb.simulate.order import Action, Kind
from wlb.spec import RunSpec


def activation_bytes(spec: RunSpec, tokens: IntArray) -> tuple[IntArray, IntArray]:
    """(kept for backward, output) of one pass through one stage; tokens: of a micro-batch, all CP
    ranks, any shape."""
    layers = spec.model.num_layers // spec.num_stages
    values, place = np.unique(tokens, return_inverse=True)
    kept = [layers * layer_activation_bytes(spec, micro_batch_tokens=int(t)) for t in values]
    size = DTYPE_BYTES[str(spec.training.dtype)] * spec.model.hidden_size
    local = -(-tokens // spec.parallel.cp)
    return np.array(kept, np.int64)[place].reshape(tokens.shape), local * size // spec.parallel.tp


def peak_activation_bytes(order: Sequence[Action], kept: IntArray, output: IntArray) -> IntArray:
    """Most bytes held at once by a rank with these passes, shape [...]; kept, output: [..., n]."""
    held = np.zeros(kept.shape[:-1], np.int64)
    peak = held
    for _, kind, i in order:
        match kind:
            case Kind.FORWARD:
                held = held + kept[..., i] + output[..., i]
                peak = np.maximum(peak, held)
            case Kind.BACKWARD:
                held = held - kept[..., i] - output[..., i]
            case Kind.BACKWARD_INPUT:
                held = held - output[..., i]
            case Kind.BACKWARD_WEIGHT:
                held = held - kept[..., i]
    return peak


def rest_bytes(spec: RunSpec, *, pp_rank: int, longest: int) -> MemoryEstimate:
    """Everything a rank needs besides; its activations and boundaries are the estimate's own."""
    return memory_of_rank(spec, pp_rank=pp_rank, micro_batch_tokens=longest)
