"""Document tokens by the ids that plans use."""

from wlb.corpus import TokenArray, TokenStore


class StoreReader:
    """A token store as `wlb.collate.TokenReader`: ids count on from epoch to epoch."""

    def __init__(self, prefix: str) -> None:
        self._store = TokenStore(prefix)
        self._lengths = self._store.lengths

    def _row(self, document: int) -> int:
        return document % self._store.num_documents

    def length(self, document: int) -> int:
        return int(self._lengths[self._row(document)])

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        return self._store.read(self._row(document), start, stop)
