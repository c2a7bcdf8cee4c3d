"""Context-parallel sharding: which span of which piece each CP rank works on."""

from wlb.sharding.adaptive import adaptive
from wlb.sharding.balanced import balanced
from wlb.sharding.hybrid import hybrid
from wlb.sharding.per_document import per_document
from wlb.sharding.per_sequence import per_sequence
from wlb.sharding.strategies import NAMES, STRATEGIES, WITH_REMAINDER, shard

__all__ = [
    "NAMES",
    "STRATEGIES",
    "WITH_REMAINDER",
    "adaptive",
    "balanced",
    "hybrid",
    "per_document",
    "per_sequence",
    "shard",
]
