"""Write a store whose documents have lengths of a given distribution and contain real text.

Use such a store if no corpus with a long tail is available. Lengths are drawn from a
family of `wlb.data.lengths.FAMILIES`; "wlb_paper" has the shape of Figure 3. The text is the source
of Python's standard library as bytes, cut wherever a document ends. A model learns something from
it, but documents are not whole texts, so losses cannot be compared with those of a real corpus.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from wlb.data.lengths import lengths_of_family
from wlb.data.store import StoreInfo, TokenStore, TokenStoreWriter, store_path
from wlb.plan import IntArray, UserError, check_at_least
from wlb.prepare.text import Skip, TextDocuments, stdlib_documents

EOS = 256
"""The token that ends each document. Tokens below it are bytes of the text."""
VOCAB_SIZE = 257
# How many document lengths are drawn in one call.
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
    """Write a store with lengths of a family and real text, and return its description.

    Args:
        prefix: Path of the store's files without their suffixes.
        family: A name of `wlb.data.lengths.FAMILIES`, such as "wlb_paper".
        num_tokens: The store ends with the first document that brings it to this many tokens.
        window: The context window in tokens, which is also the longest document. Lengths scale with
            it.
        seed: Seed of the lengths.
        overwrite: Whether to replace an existing store with this prefix.
        documents: Text to fill the documents with. None means Python's standard library.

    Raises:
        UserError: The store exists, the family is unknown, or a number is out of range.
    """
    check_at_least("--tokens", num_tokens, 1)
    check_at_least("--window", window, 2, " tokens, for one byte of text and the end token")
    if store_path(prefix, ".idx").exists() and not overwrite:
        raise UserError(
            f"the store {prefix} already exists; give another --out, or replace the store with "
            f"--overwrite"
        )
    if store_path(f"{prefix}-heldout", ".idx").exists():
        raise UserError(
            f"the store {prefix}-heldout exists, but would not belong to the new store {prefix}; "
            f"give another --out, or remove {prefix}-heldout"
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
    """Yield document lengths without end. Equal arguments give equal lengths.

    Args:
        family: Name of the distribution of lengths, a key of `FAMILIES`.
        window: Context window in tokens, which is also the longest length.
        seed: Seed of the random numbers.
    """
    for i in range(1 << 62):
        drawn = lengths_of_family(
            family, window=window, num_documents=DRAWN_AT_A_TIME, seed=seed * 1_000_003 + i
        )
        yield from map(int, drawn.lengths)


def _endless_text(documents: TextDocuments) -> Iterator[IntArray]:
    """Yield the bytes of each document, again and again without end."""
    while True:
        found = False
        for row in range(len(documents.names)):
            text = documents.read(row)
            if text and not isinstance(text, Skip):
                found = True
                yield np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        if not found:
            raise UserError(
                f"{documents.description} has no UTF-8 text with which the store could be filled; "
                f"give files with text"
            )


def _fill(out: IntArray, text: Iterator[IntArray]) -> None:
    """Fill `out` with as many texts as needed, cutting the last text.

    Args:
        out: Array to fill.
        text: Yields the bytes of texts.
    """
    done = 0
    while done < out.size:
        piece = next(text)[: out.size - done]
        out[done : done + piece.size] = piece
        done += piece.size
