"""Context-parallel sharding: which span of which piece each CP rank works on."""

from wlb.sharding.adaptive import STRATEGIES, rank_latency_ns, shard
from wlb.sharding.per_document import per_document
from wlb.sharding.per_sequence import per_sequence

__all__ = ["STRATEGIES", "per_document", "per_sequence", "rank_latency_ns", "shard"]
