"""Provides documents to pad: like the web, code and books by their mean, standard library, files.

The article gives means and nothing else: "web ~800, code ~300, books ~50K tokens". A mean leaves
the spread open, and padding depends on it, so the spread is ours: sigma 1.2 for the web, 1.4 for
code (the Stack's in `experiments.paper.packing_methods.lengths`), 0.8 for books. Lengths are
quantiles, so that the means are exact; a seed gives their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.harness.streams import source_of, title_of
from experiments.paper.packing_methods.lengths import Dataset
from wlb.plan import IntArray

WEB = Dataset(title="web-like", num_examples=100_000, tokens=80_000_000, sigma=1.2, longest=None)
CODE = Dataset(title="code-like", num_examples=100_000, tokens=30_000_000, sigma=1.4, longest=None)
BOOKS = Dataset(title="books-like", num_examples=2_000, tokens=100_000_000, sigma=0.8, longest=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Holds documents.

    lengths: tokens of each document, in the order of the stream
    """

    title: str
    lengths: IntArray

    @property
    def mean(self) -> float:
        return float(self.lengths.mean())


def drawn(dataset: Dataset, *, seed: int) -> Corpus:
    return Corpus(title=dataset.title, lengths=dataset.shuffled(seed))


def real(name: str, *, seed: int) -> Corpus:
    """Returns "stdlib" (made the first time, which takes a minute) or a file of lengths."""
    lengths = source_of(name, num_tokens=0, seed=seed).lengths
    return Corpus(title=title_of(name), lengths=np.random.default_rng(seed).permutation(lengths))


def corpora(*, seed: int, files: Sequence[str | Path], with_stdlib: bool) -> list[Corpus]:
    names = [*(["stdlib"] if with_stdlib else []), *map(str, files)]
    return [
        *(drawn(dataset, seed=seed) for dataset in (WEB, CODE, BOOKS)),
        *(real(name, seed=seed) for name in names),
    ]
