"""Provides the documents to pad: three drawn corpora, the standard library and files of lengths.

The article gives only mean lengths: "web ~800, code ~300, books ~50K tokens". Padding also depends
on the spread, so we chose one: lognormals of sigma 1.2 for the web, 1.4 for code (as for Stack in
`experiments.paper.packing_methods.lengths`) and 0.8 for books. Lengths are quantiles, so that the
means are exact, and a seed shuffles them.
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
    """The document lengths of a corpus."""

    title: str
    lengths: IntArray  # tokens of each document, in the order in which they are read

    @property
    def mean(self) -> float:
        return float(self.lengths.mean())


def drawn(dataset: Dataset, *, seed: int) -> Corpus:
    return Corpus(title=dataset.title, lengths=dataset.shuffled(seed))


def real(name: str, *, seed: int) -> Corpus:
    """Returns the corpus "stdlib" or a file of lengths.

    "stdlib" is tokenized the first time, which takes a minute.
    """
    lengths = source_of(name, num_tokens=0, seed=seed).lengths
    return Corpus(title=title_of(name), lengths=np.random.default_rng(seed).permutation(lengths))


def corpora(*, seed: int, files: Sequence[str | Path], with_stdlib: bool) -> list[Corpus]:
    names = [*(["stdlib"] if with_stdlib else []), *map(str, files)]
    return [
        *(drawn(dataset, seed=seed) for dataset in (WEB, CODE, BOOKS)),
        *(real(name, seed=seed) for name in names),
    ]
