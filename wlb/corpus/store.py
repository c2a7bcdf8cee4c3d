"""Token stores: documents as token ids in a `.bin` + `.idx` pair, Megatron's IndexedDataset.

Little-endian. `.idx`: magic, uint64 version, uint8 dtype code, uint64 number of sequences, uint64
number of document indices, then int32 sequence lengths, int64 byte offsets of sequences in `.bin`,
int64 document indices (first sequence of each document, then the number of sequences).
`.bin`: the tokens, concatenated. Beside them `<prefix>.json` (`StoreInfo`), which Megatron ignores,
holds what a token file cannot say itself: vocabulary, EOS id, tokenizer, checksum, origin.

Guarantees: a store is seen whole or not at all. The writer works under temporary names and renames
the index last, after taking an old one away. A store that does not fit its index is refused when it
is opened. Documents that hold no token (Megatron permits them) are left out and counted, so a row
of `TokenStore.lengths` is never 0; without such documents rows are Megatron's document numbers.
A document of several sequences reads as one.

Cost: writing keeps 8 bytes a document in memory. Opening reads the index once; tokens are mapped
and a read copies nothing. A pickled store is only its prefix.
"""

import hashlib
import json
import os
import secrets
import struct
from array import array
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from wlb.plan import IntArray, IntLike

TokenArray = npt.NDArray[Any]

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_BLOCK_BYTES = 1 << 24
_LONGEST = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInfo:
    """The sidecar `<prefix>.json` of a store.

    eos_id: the token that ends every document, None if there is none. tokenizer: file name beside
    the store. checksum: blake2b of `.bin`. preparation: how `wlb.corpus.prepare` made it.
    """

    vocab_size: int
    num_documents: int
    num_tokens: int
    checksum: str
    eos_id: int | None = None
    tokenizer: str | None = None
    source: str = ""
    preparation: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def read(cls, path: Path) -> "StoreInfo | None":
        """The sidecar at `path`; None if there is none, ValueError if it cannot be used."""
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            data = json.loads(text)
            info = cls(**{f.name: data[f.name] for f in fields(cls)})
            if not all(type(n) is int for n in (info.vocab_size, info.num_tokens)):
                raise TypeError("vocab_size and num_tokens must be integers")
            return info
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not the description of a token store ({error!r}); prepare the store "
                f"again, or remove this file and set model.vocab_size"
            ) from error

    def write(self, path: Path) -> None:
        temporary = temporary_name(path)
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(temporary, path)


def store_path(prefix: str | Path, suffix: str) -> Path:
    """`prefix` + `suffix`, for prefixes that contain dots as well."""
    return Path(f"{prefix}{suffix}")


def temporary_name(path: Path) -> Path:
    """A name in the folder of `path` that nobody else uses."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest dtype that Megatron and we write for ids below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<i4")


class TokenStoreWriter:
    """Writes a store document by document; a context manager.

    Leaving the block normally makes the store visible; leaving it by an exception leaves no trace
    and an older store of the same name untouched. `preparation` goes to the sidecar and may be
    added to until then.
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
            raise ValueError(f"vocab_size = {vocab_size} must be in [1, 2**31]")
        self.prefix = str(prefix)
        self.preparation = dict(preparation or {})
        self._info = StoreInfo(
            vocab_size=vocab_size,
            num_documents=0,
            num_tokens=0,
            checksum="",
            eos_id=eos_id,
            tokenizer=tokenizer,
            source=source,
        )
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._lengths = array("q")
        self._num_tokens = 0
        self._hash = hashlib.blake2b(digest_size=32)
        self._done = False
        bin_path = store_path(prefix, ".bin")
        bin_path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = temporary_name(bin_path)
        self._file = open(self._temporary, "wb", buffering=1 << 20)  # noqa: SIM115

    @property
    def num_documents(self) -> int:
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def add(self, tokens: IntLike) -> None:
        """Appends one document (shape [num_tokens]); ValueError naming a document it cannot be."""
        ids = np.asarray(tokens)
        number = len(self._lengths)
        if ids.ndim != 1 or not 1 <= ids.size <= _LONGEST:
            raise ValueError(
                f"document {number} of {self.prefix} has shape {ids.shape}; a document is one axis "
                f"of 1 to {_LONGEST} tokens, so leave empty ones out"
            )
        if ids.dtype.kind not in "iu":
            raise ValueError(
                f"document {number} of {self.prefix} has dtype {ids.dtype}; tokens are integers"
            )
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            at = int(np.flatnonzero((ids < 0) | (ids >= self._vocab_size))[0])
            raise ValueError(
                f"document {number} of {self.prefix}: token {at} is {ids[at]}, outside the "
                f"vocabulary [0, {self._vocab_size}); use the tokenizer's whole vocab_size, with "
                f"added tokens"
            )
        data = ids.astype(self._dtype).tobytes()
        self._hash.update(data)
        self._file.write(data)
        self._lengths.append(ids.size)
        self._num_tokens += ids.size

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
        """Removes what was written; nothing happens after `finish`."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def finish(self) -> StoreInfo:
        """Makes the store visible: old index away, then tokens, sidecar and, last, the index."""
        info = replace(
            self._info,
            num_documents=self.num_documents,
            num_tokens=self._num_tokens,
            checksum=self._hash.hexdigest(),
            preparation=self.preparation,
        )
        _sync_and_close(self._file)
        index_path = store_path(self.prefix, ".idx")
        index = temporary_name(index_path)
        try:
            with open(index, "wb") as file:
                _write_index(file, self._lengths, self._dtype)
                _sync_and_close(file)
            index_path.unlink(missing_ok=True)
            os.replace(self._temporary, store_path(self.prefix, ".bin"))
            info.write(store_path(self.prefix, ".json"))
            os.replace(index, index_path)
        except BaseException:
            index.unlink(missing_ok=True)
            self.discard()
            raise
        self._done = True
        return info


def _sync_and_close(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _write_index(file: Any, lengths: "array[int]", dtype: np.dtype[Any]) -> None:
    """One sequence a document, as Megatron's preprocessing writes without sentence splitting."""
    sizes = np.frombuffer(lengths, np.int64) if lengths else np.zeros(0, np.int64)
    ends = np.cumsum(sizes)
    file.write(_HEADER.pack(_MAGIC, _VERSION, _CODES[dtype], sizes.size, sizes.size + 1))
    file.write(sizes.astype("<i4").tobytes())
    file.write(((ends - sizes) * dtype.itemsize).astype("<i8").tobytes())
    file.write(np.arange(sizes.size + 1, dtype="<i8").tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """What an `.idx` says, by document: first token and number of tokens, shape [documents]."""

    dtype: np.dtype[Any]
    start: IntArray
    length: IntArray
    num_tokens: int
    num_empty: int


class TokenStore:
    """A store opened for reading; `source_id` is what `Documents.source` will say.

    lengths: int64 tokens of each document, read-only, shape [num_documents]. Token ranges of a
    `Piece` read as `store.read(piece.document % store.num_documents, piece.start, piece.stop)`.
    """

    def __init__(self, prefix: str | Path, *, source_id: int = 0) -> None:
        self.prefix = str(prefix)
        self.source_id = source_id
        bin_path, index_path = store_path(prefix, ".bin"), store_path(prefix, ".idx")
        for path in (bin_path, index_path):
            if not path.is_file():
                raise ValueError(
                    f"no token store at {self.prefix}: {path} is missing; give the prefix without "
                    f".bin, or make the store with `wlb prepare`"
                )
        index = _read_index(index_path, num_bytes=bin_path.stat().st_size)
        self.info = StoreInfo.read(store_path(prefix, ".json"))
        self.dtype = index.dtype
        self.lengths = index.length
        self.num_empty_documents = index.num_empty
        self._start = index.start
        if self.info and self.info.num_tokens != index.num_tokens:
            raise ValueError(
                f"{self.prefix}.json describes {self.info.num_tokens} tokens, {index_path} has "
                f"{index.num_tokens}; prepare the store again, or remove the .json if it belongs "
                f"to another store"
            )
        tokens: TokenArray = np.zeros(0, index.dtype)
        if index.num_tokens:  # an empty file cannot be mapped
            tokens = np.asarray(np.memmap(bin_path, index.dtype, mode="r"))
        self._tokens = tokens

    @property
    def num_documents(self) -> int:
        return self.lengths.size

    @property
    def num_tokens(self) -> int:
        return self._tokens.size

    @property
    def vocab_size(self) -> int | None:
        """Of the sidecar; None without one, and then model.vocab_size has to say it."""
        return self.info.vocab_size if self.info else None

    @property
    def eos_id(self) -> int | None:
        return self.info.eos_id if self.info else None

    def read(self, document: int, start: int = 0, stop: int | None = None) -> TokenArray:
        """Tokens [start, stop) of a document as a read-only view of the mapped file."""
        if not 0 <= document < self.lengths.size:
            raise ValueError(
                f"document {document} is not in {self.prefix}, which has {self.lengths.size}"
            )
        length = int(self.lengths[document])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise ValueError(
                f"tokens [{start}, {stop}) are not in document {document} of {self.prefix}, which "
                f"has {length} tokens"
            )
        first = int(self._start[document])
        return self._tokens[first + start : first + stop]

    def verify(self) -> None:
        """ValueError unless `.bin` has the checksum of the sidecar; reads the whole file."""
        path = store_path(self.prefix, ".bin")
        if self.info is None:
            raise ValueError(f"{path} has no checksum: {self.prefix}.json is missing")
        found = file_checksum(path)
        if found != self.info.checksum:
            raise ValueError(
                f"{path} has checksum {found[:16]}..., {self.prefix}.json says "
                f"{self.info.checksum[:16]}...; the tokens changed, so prepare the store again"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.prefix, self.source_id)

    def __repr__(self) -> str:
        return (
            f"TokenStore({self.prefix!r}, {self.num_documents} documents, "
            f"{self.num_tokens} tokens, {self.dtype})"
        )


def _reopen(prefix: str, source_id: int) -> TokenStore:
    return TokenStore(prefix, source_id=source_id)


def file_checksum(path: Path) -> str:
    """blake2b of a file, 32 bytes in hexadecimal."""
    digest = hashlib.blake2b(digest_size=32)
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _read_index(path: Path, *, num_bytes: int) -> _Index:
    """The index at `path` for a `.bin` of `num_bytes`; ValueError for what does not fit."""
    dtype, num_sequences, num_indices = _read_header(path)
    # A copy, so that a store that is replaced under its name keeps its own documents.
    raw = np.fromfile(path, np.uint8, offset=_HEADER.size)
    lengths = raw[: 4 * num_sequences].view("<i4").astype(np.int64)
    offsets = raw[4 * num_sequences : 12 * num_sequences].view("<i8").astype(np.int64)
    firsts = raw[12 * num_sequences :].view("<i8").astype(np.int64)
    _check_sequences(path, lengths, offsets, dtype.itemsize, num_bytes)
    _check_documents(path, firsts, num_sequences, num_indices)
    boundary = np.append(offsets // dtype.itemsize, num_bytes // dtype.itemsize)[firsts]
    start, length = boundary[:-1], np.diff(boundary)
    keep = length > 0
    if not keep.all():
        start, length = start[keep], length[keep]
    length.flags.writeable = False
    return _Index(
        dtype=dtype,
        start=start,
        length=length,
        num_tokens=num_bytes // dtype.itemsize,
        num_empty=int(keep.size - keep.sum()),
    )


def _read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise ValueError(
            f"{path} is not the index of a token store: it starts with {header[:9]!r}, not "
            f"{_MAGIC!r}; stores of other formats have to be prepared again"
        )
    _, version, code, num_sequences, num_indices = _HEADER.unpack(header)
    if version != _VERSION:
        raise ValueError(f"{path} has version {version}, only {_VERSION} is known; rewrite it")
    if code not in _DTYPES:
        raise ValueError(f"{path} has dtype code {code}, known are {sorted(_DTYPES)}; rewrite it")
    size, expected = path.stat().st_size, _HEADER.size + 12 * num_sequences + 8 * num_indices
    if size != expected:
        raise ValueError(
            f"{path} has {size} bytes, {num_sequences} sequences and {num_indices} document "
            f"indices need {expected}; copy or prepare the store again (sequence modes of "
            f"multimodal stores are not read)"
        )
    return _DTYPES[code], num_sequences, num_indices


def _check_sequences(
    path: Path, lengths: IntArray, offsets: IntArray, itemsize: int, num_bytes: int
) -> None:
    """Sequences must follow each other without gap or overlap and fill the `.bin`."""
    if lengths.size and int(lengths.min()) < 0:
        i = int(np.argmin(lengths))
        raise ValueError(f"{path}: sequence {i} has length {lengths[i]}; copy the store again")
    ends = np.cumsum(lengths) * itemsize
    wrong = np.flatnonzero(offsets != ends - lengths * itemsize)
    if wrong.size:
        i = int(wrong[0])
        raise ValueError(
            f"{path}: sequence {i} is at byte {offsets[i]}, {ends[i] - lengths[i] * itemsize} is "
            f"expected (no gap or overlap after sequence {i - 1}); prepare the store again"
        )
    need = int(ends[-1]) if ends.size else 0
    if num_bytes != need:
        raise ValueError(
            f"{path.with_suffix('.bin')} has {num_bytes} bytes, its index needs {need}; the copy "
            f"is not complete or the two files are of different stores"
        )


def _check_documents(path: Path, firsts: IntArray, num_sequences: int, num_indices: int) -> None:
    """Document indices must start at 0, never go back and end with the number of sequences."""
    if num_indices == 0 or firsts[0] != 0 or firsts[-1] != num_sequences:
        shown = "none" if num_indices == 0 else f"{firsts[0]} ... {firsts[-1]}"
        raise ValueError(
            f"{path}: document indices ({shown}) must go from 0 to the {num_sequences} sequences; "
            f"write the index with a trailing count, as Megatron does"
        )
    back = np.flatnonzero(np.diff(firsts) < 0)
    if back.size:
        i = int(back[0])
        raise ValueError(
            f"{path}: document {i} starts at sequence {firsts[i]}, the next one at "
            f"{firsts[i + 1]}; document indices must not go back, so prepare the store again"
        )
