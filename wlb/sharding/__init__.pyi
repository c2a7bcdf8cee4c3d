"""Context-parallel sharding: which span of which piece each CP rank works on."""

from wlb.sharding.strategies import NAMES as NAMES
from wlb.sharding.strategies import STRATEGIES as STRATEGIES
from wlb.sharding.strategies import WITH_REMAINDER as WITH_REMAINDER
from wlb.sharding.strategies import adaptive as adaptive
from wlb.sharding.strategies import shard as shard
