"""Costs of computing weights' gradients apart from inputs' gradients (zero-bubble).

The weights' pass takes one of the two products of each linear layer's backward. Under TP it gathers
all four [tokens, hidden] tensors of a layer again (`wlb.parallel.deferred`), while the inputs' pass
keeps the gathers of gradients and the reduce-scatters: a split costs two more gathers a layer.
"""

from dataclasses import dataclass

from wlb.cost.linear import LinearCost
from wlb.cost.profile import Collective

WEIGHT_GATHERS, SAVED_GATHERS = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBackward:
    """Times of a pipeline rank's layers. weight_*: of the weights' pass. saved_*: what backward
    saves. product_ns_per_token: weights' matrix products, part of both. *_call_ns: a micro-batch.
    """

    product_ns_per_token: float
    weight_ns_per_token: float
    weight_call_ns: float
    saved_ns_per_token: float
    saved_call_ns: float


def split_backward(linear: LinearCost) -> SplitBackward:
    """Divides the linear part of backward: inputs' pass = backward - saved, and weights' pass."""
    tp, layers = linear.parallel.tp, linear.num_layers
    alpha = linear.profile.collective(Collective.ALL_GATHER, span_ranks=tp).alpha_ns * (tp > 1)
    product = linear.weight_products_ns_per_token
    exposed = 1 - linear.tp_overlap
    return SplitBackward(
        product_ns_per_token=product,
        weight_ns_per_token=product + linear.tp_wire_ns(WEIGHT_GATHERS, 0) * layers * exposed,
        weight_call_ns=WEIGHT_GATHERS * alpha * layers,
        saved_ns_per_token=product + linear.tp_wire_ns(SAVED_GATHERS, 0) * layers * exposed,
        saved_call_ns=SAVED_GATHERS * alpha * layers,
    )
