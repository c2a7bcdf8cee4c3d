"""Writes a store whose documents have the lengths of a named family, filled with real text.

Such a store stands in for a corpus with a long tail where none is at hand: the lengths are drawn
(`wlb.data.lengths.FAMILIES`, so "wlb_paper" has the shape of Figure 3), the text is that of
Python's standard library as bytes, cut wherever a length ends. A model learns something from it,
but a document is no whole text, so losses are not comparable with those of a real corpus.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from wlb.data.lengths import lengths_of_family
from wlb.data.store import StoreInfo, TokenStore, TokenStoreWriter, store_path
from wlb.plan import IntArray, UserError, check_at_least
from wlb.prepare.text import Skip, TextDocuments, stdlib_documents

EOS = 256
"""Token behind each document; tokens below it are bytes of the text."""
VOCAB_SIZE = 257
DRAWN_AT_A_TIME = 1024


def prepare_synthetic(
    prefix: str | Path,
    *,
    family: str,
    num_tokens: int,
    window: int,
    seed: int,
    overwrite: bool = False,
    documents: TextDocuments | None = None,
) -> StoreInfo:
    """Writes `prefix`.bin, .idx and .json and returns what the last one says.

    Args:
        prefix: Of the store.
        family: A name of `wlb.data.lengths.FAMILIES`, such as "wlb_paper".
        num_tokens: The store ends with the first document that brings it to this many tokens.
        window: The context window in tokens that lengths scale with; the longest document.
        seed: Of the lengths.
        overwrite: Whether an existing store of this name may be replaced.
        documents: Text to fill the documents with; Python's standard library if None.

    Raises:
        UserError: If the store exists, the family is unknown or a number is out of range.
    """
    check_at_least("--tokens", num_tokens, 1)
    check_at_least("--window", window, 2, " tokens, one of text and the end of its document")
    if store_path(prefix, ".idx").exists() and not overwrite:
        raise UserError(
            f"{prefix} is a store already; give another --out, or --overwrite to replace it"
        )
    if store_path(f"{prefix}-heldout", ".idx").exists():
        raise UserError(
            f"{prefix}-heldout is a held-out store of other documents, which would stand beside "
            f"the drawn ones; give another --out, or remove it"
        )
    documents = documents or stdlib_documents()
    text = _endless_text(documents)
    about = f"{family} lengths of window {window}, seed {seed}; text of {documents.description}"
    with TokenStoreWriter(prefix, vocab_size=VOCAB_SIZE, eos_id=EOS, source=about) as writer:
        for length in _lengths(family, window, seed):
            tokens = np.full(length, EOS, np.int64)
            _fill(tokens[:-1], text)
            writer.add(tokens)
            if writer.num_tokens >= num_tokens:
                break
    info = TokenStore(prefix).info
    assert info is not None
    return info


def _lengths(family: str, window: int, seed: int) -> Iterator[int]:
    """Lengths of the family without end, the same for any number that is taken."""
    for i in range(1 << 62):
        drawn = lengths_of_family(
            family, window=window, num_documents=DRAWN_AT_A_TIME, seed=seed * 1_000_003 + i
        )
        yield from map(int, drawn.lengths)


def _endless_text(documents: TextDocuments) -> Iterator[IntArray]:
    """Bytes of one text after the other, from the start again after the last."""
    while True:
        found = False
        for row in range(len(documents.names)):
            text = documents.read(row)
            if text and not isinstance(text, Skip):
                found = True
                yield np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        if not found:
            raise UserError(f"{documents.description} has no text to fill documents with")


def _fill(out: IntArray, text: Iterator[IntArray]) -> None:
    """Fills `out` with consecutive texts; what is left of the last one is not used."""
    done = 0
    while done < out.size:
        piece = next(text)[: out.size - done]
        out[done : done + piece.size] = piece
        done += piece.size
