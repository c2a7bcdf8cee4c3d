"""Tokens and labels of documents by the ids that plans use."""

from typing import Any

import numpy as np

from wlb.data.blend import StoreName, open_store
from wlb.data.store import TokenArray
from wlb.plan import IGNORE, DocumentIds, UserError


class StoreReader:
    """A store or blend as `wlb.parallel.rows.LabelReader`.

    Refuses tokens outside the vocabulary: under tensor parallelism they would train as zeros.
    """

    def __init__(self, name: StoreName, vocab_size: int) -> None:
        self._store = open_store(name)
        self._vocab_size = vocab_size
        self._lengths = self._store.lengths
        self._ids = DocumentIds(num_documents=self._store.num_documents)

    @property
    def identity(self) -> Any:
        """Which tokens these are, as `TokenStore.identity`, or a list of such."""
        return self._store.identity

    @property
    def has_targets(self) -> bool:
        """Whether `labels` differ from tokens: only some are trained."""
        return self._store.has_targets

    def length(self, document: int) -> int:
        return int(self._lengths[self._ids.row(document)])

    def labels(self, document: int, start: int, stop: int) -> TokenArray:
        """Tokens [start, stop), IGNORE where they are not trained, shape [stop - start]."""
        tokens = self.read(document, start, stop)
        if not self._store.has_targets:
            return tokens
        trained = self._store.trained(self._ids.row(document), start, stop)
        return np.where(trained, tokens.astype(np.int64), IGNORE)

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        row = self._ids.row(document)
        tokens = self._store.read(row, start, stop)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            raise UserError(
                f"document {row} of the store {self._store.prefix} holds tokens {tokens.min()} to "
                f"{tokens.max()}, outside the vocabulary of {self._vocab_size}; set "
                f"model.vocab_size to the store's"
            )
        return tokens
