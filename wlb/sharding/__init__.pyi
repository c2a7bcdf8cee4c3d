"""Context-parallel sharding: which tokens of which piece each CP rank processes."""

from wlb.sharding.paper import NAMES as NAMES
from wlb.sharding.paper import STRATEGIES as STRATEGIES
from wlb.sharding.paper import WITH_REMAINDER as WITH_REMAINDER
from wlb.sharding.paper import shard as shard
