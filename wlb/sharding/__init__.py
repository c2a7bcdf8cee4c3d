"""Context-parallel sharding: which span of which piece each CP rank works on."""

from wlb.sharding.balanced import balanced as balanced
from wlb.sharding.hybrid import hybrid as hybrid
from wlb.sharding.per_document import per_document as per_document
from wlb.sharding.per_sequence import per_sequence as per_sequence
from wlb.sharding.strategies import NAMES as NAMES
from wlb.sharding.strategies import STRATEGIES as STRATEGIES
from wlb.sharding.strategies import WITH_REMAINDER as WITH_REMAINDER
from wlb.sharding.strategies import adaptive as adaptive
from wlb.sharding.strategies import shard as shard
