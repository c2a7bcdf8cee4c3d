"""Section [sharding]: which tokens a context-parallel rank works on, and whose keys it gets."""

from dataclasses import dataclass
from enum import StrEnum

from wlb.spec.keys import key


class Strategy(StrEnum):
    PER_SEQUENCE = "per_sequence"
    PER_DOCUMENT = "per_document"
    HYBRID = "hybrid"
    BALANCED = "balanced"
    ADAPTIVE = "adaptive"


class Remainder(StrEnum):
    """Where per_document puts the d mod (2 * cp) left-over tokens of a document."""

    MERGED = "merged"
    ONE_BY_ONE = "one_by_one"


class ExchangeChoice(StrEnum):
    """How CP ranks get keys and values of others; `wlb.plan.KeyExchange`, or the fastest one."""

    AUTO = "auto"
    GATHER = "gather"
    NEEDED = "needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingSection:
    strategy: Strategy = key(
        Strategy.ADAPTIVE,
        "how a micro-batch is sharded over CP ranks: adaptive = per_sequence or per_document, "
        "whichever is predicted to be faster; hybrid = long documents per document, the rest "
        "per sequence; balanced = each document over as many ranks as its work requires",
    )
    remainder: Remainder = key(
        Remainder.MERGED,
        "per_document (also within adaptive): the d mod (2 * cp) tokens of a document that are "
        "left over are merged into its chunks, or dealt one_by_one as in the paper, each as a "
        "kernel segment of its own",
    )
    exchange: ExchangeChoice = key(
        ExchangeChoice.GATHER,
        "how CP ranks get keys and values of others: gather = all rows, by an all-gather; needed = "
        "each rank the rows that its spans read, by an all-to-all; auto = whichever is predicted "
        "to be faster for the micro-batch",
    )
