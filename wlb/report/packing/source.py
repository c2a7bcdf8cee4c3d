"""Facts of a corpus before it is packed: its document lengths compared with the window."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from wlb.plan import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """Lengths in tokens. short_share: share of tokens in documents shorter than half the window.

    num_long: documents longer than the window; long_share: their share of tokens.
    """

    name: str
    window: int
    num_documents: int
    num_tokens: int
    median: int
    p99: int
    longest: int
    short_share: float
    num_long: int
    long_share: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def lines(self) -> tuple[str, str]:
        """The facts in two sentences."""
        first = (
            f"{self.name}: {self.num_documents:,} documents, {self.num_tokens:,} tokens; median "
            f"{self.median:,}, p99 {self.p99:,}, longest {self.longest:,}."
        )
        second = (
            f"{self.short_share:.0%} of tokens are in documents shorter than half the window of "
            f"{self.window:,}; "
        )
        if self.num_long:
            second += (
                f"{self.num_long:,} documents ({self.long_share:.1%} of tokens) are longer than it "
                f"and are cut into pieces of at most a window."
            )
        else:
            second += "none is longer."
        return first, second


def facts_of(name: str, lengths: IntArray, *, window: int) -> SourceFacts:
    """Facts of documents of `lengths` (shape [n], n >= 1)."""
    total = int(lengths.sum())
    is_long = lengths > window
    return SourceFacts(
        name=name,
        window=window,
        num_documents=len(lengths),
        num_tokens=total,
        median=int(np.median(lengths)),
        p99=int(np.percentile(lengths, 99)),
        longest=int(lengths.max()),
        short_share=int(lengths[lengths < window / 2].sum()) / total,
        num_long=int(is_long.sum()),
        long_share=int(lengths[is_long].sum()) / total,
    )
