"""Token stores of the conversations of `docstrings.py`: `data.corpus = "docstrings"`.

They are made once for a Python version and arguments. The tokenizer is a byte-level BPE
of the conversations' own text with ChatML's two tokens.
"""

import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path

from wlb.data.store import TokenStore, store_path
from wlb.plan import UserError, digest
from wlb.prepare.chat_encode import ChatChoice
from wlb.prepare.docstrings import write_docstring_conversations
from wlb.prepare.encode import BPE
from wlb.prepare.files import locked
from wlb.prepare.pipeline import prepare_store
from wlb.prepare.request import PrepareOptions

_FORMAT = 2
_LEAST_VOCAB = 258


@dataclass(frozen=True, slots=True, kw_only=True)
class DocstringStores:
    """Prefixes of the two stores. heldout: "" where nothing is held out.

    num_documents, num_tokens, num_targets (trained tokens): of `train`. made_s: 0 if reused.
    """

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
    """Writes, or finds, the stores in `folder`, and the conversations beside them as JSONL.

    vocab_size: includes ChatML's tokens. limit: most tokens of a document; longer ones are split.
    """
    if vocab_size <= _LEAST_VOCAB:
        raise UserError(
            f"data.bpe_vocab_size = {vocab_size} must be above {_LEAST_VOCAB}: 256 bytes and three "
            f"special tokens"
        )
    prefix = docstring_prefix(
        folder, vocab_size=vocab_size, limit=limit, heldout_fraction=heldout_fraction, seed=seed
    )
    began = time.perf_counter()
    found = _find(prefix, heldout_fraction)
    if found is None:
        with locked(store_path(prefix, ".jsonl.lock")):
            found = _find(prefix, heldout_fraction)  # another process may have been faster
            if found is None:
                _make(prefix, vocab_size, limit, heldout_fraction, seed)
                found = _find(prefix, heldout_fraction)
                if found is None:
                    raise RuntimeError(f"the stores at {prefix} cannot be read after being made")
                return replace(found, made_s=time.perf_counter() - began)
    return found


def docstring_prefix(
    folder: str | Path, *, vocab_size: int, limit: int, heldout_fraction: float, seed: int
) -> Path:
    """Prefix of the stores of these arguments for this version of Python."""
    mark = digest(
        _FORMAT, platform.python_version(), vocab_size, limit, str(heldout_fraction), seed
    )
    return Path(folder) / f"docstrings-bpe{vocab_size}-{mark % 16**6:06x}"


def _make(prefix: Path, vocab_size: int, limit: int, heldout_fraction: float, seed: int) -> None:
    conversations = store_path(prefix, ".jsonl")
    write_docstring_conversations(conversations)
    asked = PrepareOptions(
        inputs=(str(conversations),),
        out=str(prefix),
        tokenizer=BPE,
        vocab_size=vocab_size,
        heldout_fraction=heldout_fraction,
        seed=seed,
        overwrite=True,  # parts of an interrupted call are of an older JSONL
    )
    prepare_store(asked, encoder=ChatChoice(template="chatml", limit=limit))


def _find(prefix: Path, heldout_fraction: float) -> DocstringStores | None:
    """The stores, or None where they are not complete; the train store is written last."""
    try:
        train = TokenStore(prefix)
        heldout = TokenStore(f"{prefix}-heldout") if heldout_fraction else None
    except (UserError, OSError):
        return None
    assert train.vocab_size is not None
    return DocstringStores(
        train=train.prefix,
        heldout=heldout.prefix if heldout is not None and heldout.num_documents else "",
        vocab_size=train.vocab_size,
        num_documents=train.num_documents,
        num_tokens=train.num_tokens,
        num_targets=int(train.num_targets.sum()),
        made_s=0.0,
    )
