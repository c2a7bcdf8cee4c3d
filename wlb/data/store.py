"""Read and write token stores, which hold the token ids of documents on disk.

A store is a set of files with a common prefix:

    <prefix>.bin      the tokens of all documents, one after the other
    <prefix>.idx      where each document begins (`index.py`)
    <prefix>.json     vocabulary, EOS id, tokenizer, checksum and origin (`StoreInfo`)
    <prefix>.targets  which tokens are trained, only for fine-tuning (`targets.py`)

The first two are Megatron's IndexedDataset. Megatron ignores the other two.
Guarantees: a reader never sees a half-written store, because the writer renames the index into
place last. A store whose files do not fit each other is refused. Megatron permits empty documents;
they are left out and counted, so documents are numbered as in Megatron only if none is empty.
Cost: writing keeps 8 bytes per document in memory. Files are mapped, so reading copies nothing.
"""

import hashlib
import json
import os
import secrets
from array import array
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from wlb.data.folder import make_folder
from wlb.data.index import read_index, write_index
from wlb.data.targets import Targets, TargetSpans
from wlb.plan import BoolArray, IntArray, IntLike, UserError
from wlb.plan.read_file import Fields, malformed, read_object
from wlb.plan.schema import ANYTHING, COUNT, OTHERS, Schema, check_schema, schema_of

TokenArray = npt.NDArray[Any]

# The most tokens that a document may have, because the index stores lengths as int32.
_LONGEST = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInfo:
    """The description of a store, which is the content of its file `<prefix>.json`."""

    vocab_size: int
    num_documents: int  # includes empty documents
    num_tokens: int
    checksum: str  # blake2b of the `.bin` file, in hexadecimal
    eos_id: int | None = None  # token that ends every document, or None
    # Name of the tokenizer's file in the folder of the store; None if there is no such file.
    tokenizer: str | None = None
    source: str = ""  # where the documents come from, in words
    # Settings and counts that `wlb prepare` records, such as skipped documents.
    preparation: dict[str, Any] = field(default_factory=dict[str, Any])
    targets: str | None = None  # blake2b of the `.targets` file, None if there is no such file

    @classmethod
    def read(cls, path: Path) -> "StoreInfo | None":
        """Read the description at `path`; return None if there is no such file.

        Raises:
            UserError: The file is not the description of a store, or has impossible values.
        """
        if not path.exists():
            return None
        remedy = "prepare the store again, or remove this file and set model.vocab_size"
        where = f"{path} is not the description of a token store"
        with malformed(where, remedy):
            # `wide` permits integers of more than 64 bits. `preparation` contains a whole
            # tokenizer_config.json, and Hugging Face writes such integers there.
            data = read_object(path, remedy=remedy, wide=True)
        check_schema(data, _INFO, where, remedy=remedy)
        of = Fields(data, where, remedy=remedy)
        tokenizer = of.text("tokenizer", "") or None
        if tokenizer and Path(tokenizer).name != tokenizer:
            raise of.error("tokenizer", "must be the name of a file in the store's folder")
        if data.get("eos_id") is not None:
            of.whole("eos_id", at_least=0, at_most=data["vocab_size"] - 1)
        values: dict[str, Any] = {**data, "tokenizer": tokenizer}
        return cls(**values)

    def write(self, path: Path) -> None:
        """Write the description to `path`, replacing an older file atomically."""
        temporary = temporary_name(path)
        data = asdict(self)
        if self.targets is None:
            del data["targets"]
        temporary.write_text(json.dumps(data, indent=1) + "\n")
        os.replace(temporary, path)


# The parts of `StoreInfo.preparation` that wlb reads. Other keys may have any values.
_PREPARATION: Schema = {
    "arguments?": {"encoder?": dict, OTHERS: ANYTHING},
    "tokenizer_config?": dict,
    "chat?": {"template": str, "variables": {OTHERS: str}, "ends": {OTHERS: COUNT}},
    "counts?": dict,
    "skipped?": dict,
    "examples?": dict,
    "num_unknown?": COUNT,
    OTHERS: ANYTHING,
}
_INFO: Schema = schema_of(
    StoreInfo,
    vocab_size=range(1, (1 << 31) + 1),
    num_documents=COUNT,
    num_tokens=COUNT,
    preparation=_PREPARATION,
)


def store_path(prefix: str | Path, suffix: str) -> Path:
    """Return the path `prefix` + `suffix`. Unlike `with_suffix`, it keeps a dot in the prefix."""
    return Path(f"{prefix}{suffix}")


def temporary_name(path: Path) -> Path:
    """Return a unique path for a temporary file in the folder of `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype that Megatron chooses for token ids below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<i4")


class TokenStoreWriter:
    """Writes a store document by document; use it as a context manager.

    The end of the `with` block makes the store visible. An exception in the block removes the new
    files, and an older store with the same prefix stays.

    Args:
        prefix: Path of the store's files without their suffixes.
        vocab_size: Every token id must be below this.
        eos_id: Token that ends every document, None if there is none.
        tokenizer: Name of the tokenizer's file, in the folder of the store.
        source: Where the documents come from, in words.
        preparation: How the store was made, as JSON values. The attribute `preparation` is a copy,
            to which the caller may add entries until the block ends.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        vocab_size: int,
        eos_id: int | None = None,
        tokenizer: str | None = None,
        source: str = "",
        preparation: dict[str, Any] | None = None,
    ) -> None:
        if not 1 <= vocab_size <= 1 << 31:
            raise UserError(f"vocab_size = {vocab_size} must be from 1 to 2**31")
        self.prefix = str(prefix)
        self.preparation = dict(preparation or {})
        self._vocab_size = vocab_size
        self._origin: dict[str, Any] = {"eos_id": eos_id, "tokenizer": tokenizer, "source": source}
        self._dtype = token_dtype(vocab_size)
        self._lengths = array("q")
        self.num_tokens = 0
        self._targets: TargetSpans | None = None
        self._hash = hashlib.blake2b(digest_size=32)
        self._done = False
        bin_path = store_path(prefix, ".bin")
        make_folder(bin_path.parent)
        self._temporary = temporary_name(bin_path)
        self._file = open(self._temporary, "wb", buffering=1 << 20)  # noqa: SIM115

    @property
    def num_documents(self) -> int:
        """Number of documents written so far."""
        return len(self._lengths)

    def add(self, tokens: IntLike, trained: IntLike | None = None) -> None:
        """Append one document.

        Args:
            tokens: Token ids of the document, shape [num_tokens].
            trained: Half-open spans of the tokens that are trained, int64 of shape [k, 2]. Give
                them for every document of a store or for none. Without them every token is
                trained except the first, which no earlier token predicts.

        Raises:
            UserError: The document is empty, has ids outside the vocabulary, or has wrong spans.
        """
        ids = np.asarray(tokens)
        name = f"document {len(self._lengths)} of {self.prefix}"
        if ids.ndim != 1 or not 1 <= ids.size <= _LONGEST:
            raise UserError(
                f"{name} has shape {ids.shape}, but must be a one-dimensional array of 1 to "
                f"{_LONGEST} tokens; leave out empty documents"
            )
        if ids.dtype.kind not in "iu":
            raise UserError(
                f"{name} has dtype {ids.dtype}, but tokens must be integers; give token ids"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            at = int(np.flatnonzero((ids < 0) | (ids >= self._vocab_size))[0])
            raise UserError(
                f"{name}: token {at} is {ids[at]}, outside the vocabulary [0, "
                f"{self._vocab_size}); set vocab_size to the size of the tokenizer's whole "
                f"vocabulary, including added tokens"
            )
        self._add_targets(trained, ids.size, name)
        data = ids.astype(self._dtype).tobytes()
        self._hash.update(data)
        self._file.write(data)
        self._lengths.append(ids.size)
        self.num_tokens += ids.size

    def _add_targets(self, trained: IntLike | None, length: int, name: str) -> None:
        if trained is not None and not self._lengths:
            self._targets = TargetSpans()
        if (trained is None) != (self._targets is None):
            raise UserError(
                f"{name} {'has no' if trained is None else 'has'} spans of trained tokens, unlike "
                f"the documents before it; give spans for all documents of a store (an empty list "
                f"if no token is trained) or for none"
            )
        if self._targets is not None and trained is not None:
            self._targets.add(trained, first=self.num_tokens, length=length, name=name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.discard()
        elif not self._done:
            self.finish()

    def discard(self) -> None:
        """Give up the store and remove its temporary file. After `finish` this does nothing."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def finish(self) -> StoreInfo:
        """Make the store visible, and return its description.

        For readers, a store without an index does not exist. So this method first removes the old
        index, then renames the other files into place, and renames the new index last.
        """
        info = StoreInfo(
            vocab_size=self._vocab_size,
            num_documents=self.num_documents,
            num_tokens=self.num_tokens,
            checksum=self._hash.hexdigest(),
            preparation=self.preparation,
            **self._origin,
        )
        index_path, targets_path = (store_path(self.prefix, end) for end in (".idx", ".targets"))
        index, targets = temporary_name(index_path), temporary_name(targets_path)
        try:
            _sync_and_close(self._file)
            with open(index, "wb") as file:
                write_index(file, self._lengths, self._dtype)
                _sync_and_close(file)
            if self._targets is not None:
                sizes = {"num_documents": info.num_documents, "num_tokens": info.num_tokens}
                with open(targets, "wb") as file:
                    self._targets.write(file, **sizes, checksum=info.checksum)
                    _sync_and_close(file)
                info = replace(info, targets=file_checksum(targets))
            # From here until the last rename, no reader can open the store.
            index_path.unlink(missing_ok=True)
            os.replace(self._temporary, store_path(self.prefix, ".bin"))
            targets_path.unlink(missing_ok=True)
            if info.targets is not None:
                os.replace(targets, targets_path)
            info.write(store_path(self.prefix, ".json"))
            os.replace(index, index_path)
        except BaseException:
            index.unlink(missing_ok=True)
            targets.unlink(missing_ok=True)
            self.discard()
            raise
        self._done = True
        return info


def _sync_and_close(file: Any) -> None:
    # Data must be on disk before the rename, so that a power cut cannot leave an empty file.
    file.flush()
    os.fsync(file.fileno())
    file.close()


class TokenStore:
    """A token store opened for reading. Its documents are numbered from 0 in file order.

    Plans use other numbers, document ids, which are different in each epoch. `StoreReader` reads a
    store by document id.

    Args:
        prefix: Path of the store's files without their suffixes.
        source_id: Value of `Documents.source` for documents of this store.

    Attributes:
        lengths: Tokens of each document, int64 of shape [num_documents], read-only.
        num_targets: Trained tokens of each document, int64 of shape [num_documents], read-only.
            Without a `.targets` file all tokens but the first are trained.
        info: The store's description (`<prefix>.json`), None for a store that Megatron wrote.
        dtype: Type of the tokens.
        num_empty_documents: Documents without tokens, which are left out.

    Raises:
        UserError: A file is missing, damaged, or does not fit the others.
    """

    def __init__(self, prefix: str | Path, *, source_id: int = 0) -> None:
        self.prefix = str(prefix)
        self.source_id = source_id
        bin_path, index_path = store_path(prefix, ".bin"), store_path(prefix, ".idx")
        for path in (bin_path, index_path):
            if not path.is_file():
                raise UserError(
                    f"there is no token store at {self.prefix}: {path} is missing; give the "
                    f"path of a store without .bin, or make the store with wlb prepare"
                )
        index = read_index(index_path, num_bytes=bin_path.stat().st_size)
        self.info = StoreInfo.read(store_path(prefix, ".json"))
        self.dtype = index.dtype
        self.lengths = index.length
        self.num_empty_documents = index.num_empty
        self._start = index.start
        if self.info and self.info.num_tokens != index.num_tokens:
            raise UserError(
                f"{self.prefix}.json describes {self.info.num_tokens} tokens, but {index_path} "
                f"has {index.num_tokens}; prepare the store again, or remove the .json if it "
                f"belongs to another store"
            )
        if self.dtype.kind not in "iu":
            raise UserError(
                f"{bin_path} has tokens of type {self.dtype}, but tokens must be integers; prepare "
                f"the store again"
            )
        whole = index.length.size + index.num_empty
        if self.info and self.info.num_documents != whole:
            raise UserError(
                f"{self.prefix}.json describes {self.info.num_documents} documents, but "
                f"{index_path} has {whole}; prepare the store again, or remove the .json if it "
                f"belongs to another store"
            )
        largest = np.iinfo(self.dtype).max
        if self.info and self.info.vocab_size > largest + 1:
            raise UserError(
                f"{self.prefix}.json has vocab_size = {self.info.vocab_size}, but {bin_path} has "
                f"tokens of type {self.dtype}, whose largest value is {largest}; larger token ids "
                f"were truncated, so prepare the store again"
            )
        self._targets = self._open_targets()
        self.num_targets = index.length - 1
        if self._targets is not None:
            self.num_targets = self._targets.num_targets
        self.num_targets.flags.writeable = False
        self._tokens: TokenArray = np.zeros(0, index.dtype)
        # An empty file cannot be mapped.
        if index.num_tokens:
            self._tokens = np.asarray(np.memmap(bin_path, index.dtype, mode="r"))

    def _open_targets(self) -> Targets | None:
        path = store_path(self.prefix, ".targets")
        expected = self.info.targets if self.info else None
        if path.is_file() != (expected is not None):
            # Without the right `.targets` file, training would silently train all tokens.
            problem = "is missing, so wlb cannot know which tokens to train"
            if expected is None:
                problem = f"belongs to another store, as {self.prefix}.json has no checksum for it"
            raise UserError(f"{path} {problem}; copy or prepare the store again")
        if self.info is None or expected is None:
            return None
        return Targets(path, first=self._start, length=self.lengths, checksum=self.info.checksum)

    @property
    def identity(self) -> dict[str, Any]:
        """Values that identify the store's tokens: checksums, vocabulary and tokenizer.

        Stores with equal identities train the same tokens. Checkpoints contain the identity, so
        that a run refuses to resume with another store. All values are None for a store without a
        `.json` file.
        """
        info = self.info
        return {
            "tokens": info and info.checksum,
            "targets": info and info.targets,
            "vocab_size": info and info.vocab_size,
            "eos_id": info and info.eos_id,
            "tokenizer": info and info.preparation.get("tokenizer_checksum"),
        }

    @property
    def num_documents(self) -> int:
        """Number of documents of the store."""
        return self.lengths.size

    @property
    def has_targets(self) -> bool:
        """Whether a `.targets` file says which tokens are trained."""
        return self._targets is not None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return self._tokens.size

    @property
    def summary(self) -> str:
        """The size of the store in words, such as "3 documents, 40 tokens"."""
        return summary_of(self.num_documents, self.num_tokens, self.num_empty_documents)

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size, or None for a store without a `.json` file."""
        return self.info.vocab_size if self.info else None

    @property
    def eos_id(self) -> int | None:
        """The token that ends every document, or None if it is not known."""
        return self.info.eos_id if self.info else None

    def read(self, document: int, start: int = 0, stop: int | None = None) -> TokenArray:
        """Return tokens [start, stop) of a document as a read-only view of the mapped file.

        Args:
            document: Index of the document in the store.
            start: First token, counted from the document's beginning.
            stop: End of the tokens. None means the document's end.

        Raises:
            UserError: The store has no such tokens.
        """
        num = self.lengths.size
        if not 0 <= document < num:
            raise UserError(
                f"document {document} is not in {self.prefix}, which has {num} documents, numbered "
                f"from 0"
            )
        length = int(self.lengths[document])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise UserError(
                f"tokens [{start}, {stop}) are outside document {document} of {self.prefix}, "
                f"which has {length} tokens; give a range inside the document"
            )
        first = int(self._start[document])
        return self._tokens[first + start : first + stop]

    def trained(self, document: int, start: int = 0, stop: int | None = None) -> BoolArray:
        """Return whether each of the tokens [start, stop) of a document is trained.

        A token is trained if its prediction from the tokens before it counts in the loss, so token
        0 of a document never is.

        Args:
            document: Index of the document in the store.
            start: First token, counted from the document's beginning.
            stop: End of the tokens. None means the document's end.

        Returns:
            A mask of shape [stop - start].
        """
        # `read` raises UserError for positions that the store does not have.
        size = self.read(document, start, stop).size
        if self._targets is not None:
            return self._targets.trained(document, start, start + size)
        out = np.ones(size, bool)
        out[: max(0, 1 - start)] = False
        return out

    def count_targets(self, document: IntLike, start: IntLike, stop: IntLike) -> IntArray:
        """Count the trained labels of pieces of documents.

        The label of a token is the next token of the document, and the last token has no label. So
        the labels of a piece are the document's tokens [start + 1, min(stop + 1, length)).

        Args:
            document: Index of each piece's document in the store, shape [num_pieces].
            start: First token of each piece, shape [num_pieces].
            stop: End of each piece, shape [num_pieces].

        Returns:
            Number of trained labels of each piece, shape [num_pieces].
        """
        if self._targets is not None:
            return self._targets.count(document, start, stop)
        rows = np.asarray(document, np.int64)
        last = np.minimum(np.asarray(stop, np.int64), self.lengths[rows] - 1)
        return last - np.asarray(start, np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle the prefix, so that another process opens the files itself.
        return partial(TokenStore, source_id=self.source_id), (self.prefix,)

    def __repr__(self) -> str:
        return f"TokenStore({self.prefix!r}, {self.summary}, {self.dtype})"


def summary_of(num_documents: int, num_tokens: int, num_empty: int) -> str:
    """Describe the size of a store in words, for example "3 documents, 40 tokens".

    Args:
        num_documents: Documents with tokens.
        num_tokens: Tokens of all documents.
        num_empty: Documents without tokens, which are left out of `num_documents`.
    """
    empty = f"{num_empty:,} empty document{'s' if num_empty > 1 else ''} left out"
    sizes = f"{num_documents:,} documents, {num_tokens:,} tokens"
    return f"{sizes}, {empty}" if num_empty else sizes


def file_checksum(path: Path) -> str:
    """Return the 32-byte blake2b hash of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
