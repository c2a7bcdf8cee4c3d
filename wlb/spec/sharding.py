"""Section [sharding]: which tokens each context-parallel rank processes, and which keys it gets."""

from dataclasses import dataclass
from enum import StrEnum

from wlb.spec.keys import key


class Strategy(StrEnum):
    """Rule that divides a micro-batch over CP ranks."""

    PER_SEQUENCE = "per_sequence"
    PER_DOCUMENT = "per_document"
    HYBRID = "hybrid"
    BALANCED = "balanced"
    ADAPTIVE = "adaptive"


class Remainder(StrEnum):
    """Where `per_document` puts the tokens that do not fill 2 * cp equal chunks of a document."""

    MERGED = "merged"
    ONE_BY_ONE = "one_by_one"


class ExchangeChoice(StrEnum):
    """How CP ranks receive keys and values. AUTO means the exchange predicted to be faster."""

    AUTO = "auto"
    GATHER = "gather"
    NEEDED = "needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingSection:
    """Section [sharding]."""

    strategy: Strategy = key(
        Strategy.ADAPTIVE,
        "rule that divides a micro-batch over CP ranks: per_sequence = the whole micro-batch in 2 "
        "* cp chunks; per_document = each document in 2 * cp chunks; adaptive = whichever of these "
        "is predicted to be faster; hybrid = long documents per document, the rest per sequence; "
        "balanced = each document over as many ranks as its work requires",
    )
    remainder: Remainder = key(
        Remainder.MERGED,
        "per_document (also within adaptive): where the d mod (2 * cp) tokens go that do not fill "
        "equal chunks of a document of d tokens: merged = into its chunks; one_by_one = to the "
        "ranks in turn, each as a kernel segment of its own, as in the paper",
    )
    exchange: ExchangeChoice = key(
        ExchangeChoice.GATHER,
        "how CP ranks receive keys and values: gather = an all-gather of all rows; needed = an "
        "all-to-all of only the rows that each rank's spans attend to; auto = whichever is "
        "predicted to be faster for the micro-batch",
    )
