"""Read tokens and labels of documents by the document ids of plans."""

from typing import Any

import numpy as np

from wlb.data.blend import StoreName, open_store
from wlb.data.store import TokenArray
from wlb.plan import IGNORE, DocumentIds, UserError


class StoreReader:
    """Reads tokens and labels of a store or a blend by the document ids of plans.

    The class implements `wlb.parallel.rows.LabelReader`. It raises UserError for a token outside
    the model's vocabulary. With tensor parallelism such a token would silently get an embedding of
    zeros, because no rank's part of the embedding table has a row for it.

    Args:
        name: Prefix of a store, or the entries of `data.blend`.
        vocab_size: Vocabulary size of the model.
    """

    def __init__(self, name: StoreName, vocab_size: int) -> None:
        self._store = open_store(name)
        self._vocab_size = vocab_size
        self._lengths = self._store.lengths
        self._ids = DocumentIds(num_documents=self._store.num_documents)

    @property
    def identity(self) -> Any:
        """The identity of the store (`TokenStore.identity`), or a list with one per store."""
        return self._store.identity

    @property
    def has_targets(self) -> bool:
        """Whether the store says which tokens are trained. If False, all labels are trained."""
        return self._store.has_targets

    def length(self, document: int) -> int:
        """Return the number of tokens of the document with this id."""
        return int(self._lengths[self._ids.row(document)])

    def labels(self, document: int, start: int, stop: int) -> TokenArray:
        """Return tokens [start, stop) as labels, shape [stop - start].

        Tokens that are not trained become IGNORE, which the loss leaves out.
        """
        tokens = self.read(document, start, stop)
        if not self._store.has_targets:
            return tokens
        trained = self._store.trained(self._ids.row(document), start, stop)
        return np.where(trained, tokens.astype(np.int64), IGNORE)

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        """Return tokens [start, stop) of the document with this id, shape [stop - start]."""
        row = self._ids.row(document)
        tokens = self._store.read(row, start, stop)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            raise UserError(
                f"document {row} of the store {self._store.prefix} has token ids from "
                f"{tokens.min()} to {tokens.max()}, but they must be from 0 to "
                f"{self._vocab_size - 1}; set model.vocab_size to the vocabulary size of the store"
            )
        return tokens
