"""Section [sharding]: which tokens each context-parallel rank processes, and which keys it gets."""

from dataclasses import dataclass
from enum import StrEnum

from wlb.spec.keys import key


class Strategy(StrEnum):
    """Rule that divides a micro-batch over CP ranks."""

    PER_SEQUENCE = "per_sequence"  # cut the whole micro-batch into 2 * cp chunks
    PER_DOCUMENT = "per_document"  # cut each document into 2 * cp chunks
    HYBRID = "hybrid"  # long documents as PER_DOCUMENT, the others as PER_SEQUENCE
    BALANCED = "balanced"  # spread each document over as many ranks as its work requires
    ADAPTIVE = "adaptive"  # PER_SEQUENCE or PER_DOCUMENT, whichever is predicted to be faster


class Remainder(StrEnum):
    """Rule for the tokens that are left if a document is divided into 2 * cp equal chunks."""

    MERGED = "merged"  # some chunks get one token more
    ONE_BY_ONE = "one_by_one"  # ranks get these tokens in turn, each as a separate segment


class ExchangeChoice(StrEnum):
    """How CP ranks receive keys and values. AUTO is whichever is predicted to be faster."""

    AUTO = "auto"
    GATHER = "gather"  # an all-gather of all rows
    NEEDED = "needed"  # an all-to-all of only the rows that a rank's spans attend to


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingSection:
    """Section [sharding]: how a micro-batch is divided over CP ranks."""

    strategy: Strategy = key(
        Strategy.ADAPTIVE,
        "rule that divides a micro-batch over CP ranks: per_sequence = cut the whole micro-batch "
        "into 2 * cp chunks; per_document = cut each document into 2 * cp chunks; adaptive = "
        "per_sequence or per_document, whichever is predicted to be faster; hybrid = divide long "
        "documents as per_document does, and the others as per_sequence does; balanced = spread "
        "each document over as many ranks as its work requires",
    )
    remainder: Remainder = key(
        Remainder.MERGED,
        "with strategy = per_document or adaptive: what happens to the d mod (2 * cp) tokens that "
        "remain after a document of d tokens is cut into 2 * cp equal chunks: merged = some chunks "
        "get one token more; one_by_one = ranks get the tokens in turn, each token as a separate "
        "segment of the attention kernel, as in the paper",
    )
    exchange: ExchangeChoice = key(
        ExchangeChoice.GATHER,
        "how CP ranks receive keys and values: gather = an all-gather of all rows; needed = an "
        "all-to-all of only the rows that each rank's spans attend to; auto = whichever is "
        "predicted to be faster for the micro-batch",
    )
