"""Conversations of `docstrings.py` as token stores: what `data.corpus = "docstrings"` trains on.

Made once for a Python version and these arguments, and found again. The tokenizer is a byte-level
BPE of the conversations' own text with ChatML's two tokens.
"""

import platform
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from wlb.corpus.chat_store import prepare_conversations
from wlb.corpus.chat_template import CHATML
from wlb.corpus.docstrings import docstring_conversations, write_docstring_conversations
from wlb.corpus.prepare import locked, train_bpe
from wlb.corpus.store import TokenStore, store_path
from wlb.plan import digest

_FORMAT = 1
_TEMPLATE_TOKENS = 2
"""That ChatML adds to the BPE's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocstringStores:
    """Prefixes of the two stores. num_targets: trained tokens. made_s: 0 where they were found."""

    train: str
    heldout: str
    vocab_size: int
    num_documents: int
    num_tokens: int
    num_targets: int
    made_s: float


def prepare_docstrings(
    folder: str | Path, *, vocab_size: int, limit: int, heldout_fraction: float, seed: int
) -> DocstringStores:
    """Writes, or finds, the stores in `folder`; conversations longer than `limit` are split.

    vocab_size: of the model, ChatML's tokens included.
    """
    prefix = docstring_prefix(
        folder, vocab_size=vocab_size, limit=limit, heldout_fraction=heldout_fraction, seed=seed
    )
    began = time.perf_counter()
    found = _find(prefix, vocab_size)
    if found is None:
        with locked(store_path(prefix, ".lock")):
            found = _find(prefix, vocab_size)  # another process may have been faster
            if found is None:
                _make(prefix, vocab_size, limit, heldout_fraction, seed)
                found = _find(prefix, vocab_size)
                if found is None:
                    raise RuntimeError(f"the stores at {prefix} cannot be read after being made")
                return replace(found, made_s=time.perf_counter() - began)
    return found


def docstring_prefix(
    folder: str | Path, *, vocab_size: int, limit: int, heldout_fraction: float, seed: int
) -> Path:
    """What the names of the two stores begin with, for this version of Python."""
    mark = digest(
        _FORMAT, platform.python_version(), vocab_size, limit, str(heldout_fraction), seed
    )
    return Path(folder) / f"docstrings-bpe{vocab_size}-{mark % 16**6:06x}"


def _make(prefix: Path, vocab_size: int, limit: int, heldout_fraction: float, seed: int) -> None:
    texts = (m["content"] for c in docstring_conversations() for m in c["messages"])
    tokenizer = train_bpe(texts, vocab_size - _TEMPLATE_TOKENS)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "docstrings.jsonl"
        write_docstring_conversations(path)
        prepare_conversations(
            path,
            prefix,
            tokenizer=tokenizer,
            template=CHATML,
            add_tokens=True,
            limit=limit,
            heldout_fraction=heldout_fraction,
            seed=seed,
        )


def _find(prefix: Path, vocab_size: int) -> DocstringStores | None:
    """None where they are absent or not complete: the train store is written last."""
    try:
        train = TokenStore(f"{prefix}-train")
        heldout = TokenStore(f"{prefix}-heldout")
    except (ValueError, OSError):
        return None
    return DocstringStores(
        train=train.prefix,
        heldout=heldout.prefix if heldout.num_documents else "",
        vocab_size=train.vocab_size or vocab_size,
        num_documents=train.num_documents,
        num_tokens=train.num_tokens,
        num_targets=int(train.num_targets.sum()),
        made_s=0.0,
    )
