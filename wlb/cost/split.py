"""What changes where a schedule computes weight gradients apart from input gradients (zero-bubble).

The weights' pass has one of the two matrix products of every linear layer's backward. Under TP it
gathers all four of a layer's [tokens, hidden] tensors again, its two inputs and its two outputs'
gradients, one ahead of the product that needs it (`wlb.parallel.deferred`); the inputs' pass keeps
the gathers of gradients and the reduce-scatters. So splitting costs two gathers a layer, besides
the memory: what waits for the weights' pass is as large as what forward kept, but for the
log-sum-exp.
"""

from dataclasses import dataclass

from wlb.cost.linear import LinearCost
from wlb.cost.profile import Collective

WEIGHT_GATHERS, SAVED_GATHERS = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBackward:
    """A pipeline rank's layers: what moves from backward to the weights' pass, and what is added.

    product_ns_per_token: the weights' matrix products, part of both sums. *_ns_per_token: of a
    micro-batch's tokens. *_call_ns: once a micro-batch.
    """

    product_ns_per_token: float
    weight_ns_per_token: float
    weight_call_ns: float
    saved_ns_per_token: float
    saved_call_ns: float


def split_backward(linear: LinearCost) -> SplitBackward:
    """How the linear part of backward divides into inputs' = backward - saved, and weights'."""
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
