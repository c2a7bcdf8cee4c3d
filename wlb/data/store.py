"""Token stores: documents as token ids in a `.bin` + `.idx` pair, Megatron's IndexedDataset.

Beside them: `<prefix>.json` (`StoreInfo`: vocabulary, EOS id, tokenizer, checksum, origin), which
Megatron ignores, and for fine-tuning `<prefix>.targets` (`targets.py`).
Guarantees: a store is seen whole or not at all, since the writer renames the index last; a store
that does not fit its index is refused. Empty documents, which Megatron permits, are left out and
counted; without them rows are Megatron's document numbers. Documents of several sequences are one.
Cost: writing keeps 8 bytes a document; tokens are mapped, so a read copies nothing.
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

_LONGEST = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInfo:
    """The sidecar `<prefix>.json` of a store.

    eos_id: the token that ends every document, None if there is none. tokenizer: file name beside
    the store. checksum: blake2b of `.bin`. preparation: `wlb.prepare`'s record of its input.
    targets: blake2b of `.targets`, None for a store without it.
    """

    vocab_size: int
    num_documents: int
    num_tokens: int
    checksum: str
    eos_id: int | None = None
    tokenizer: str | None = None
    source: str = ""
    preparation: dict[str, Any] = field(default_factory=dict[str, Any])
    targets: str | None = None

    @classmethod
    def read(cls, path: Path) -> "StoreInfo | None":
        """The sidecar at `path`; None if there is none, UserError if it cannot be used."""
        if not path.exists():
            return None
        remedy = "prepare the store again, or remove this file and set model.vocab_size"
        where = f"{path} is not the description of a token store"
        with malformed(where, remedy):
            # `preparation` holds the tokenizer_config.json of the tokenizer.
            data = read_object(path, remedy=remedy, wide=True)
        check_schema(data, _INFO, where, remedy=remedy)
        of = Fields(data, where, remedy=remedy)
        tokenizer = of.text("tokenizer", "") or None
        if tokenizer and Path(tokenizer).name != tokenizer:
            raise of.error("tokenizer", "must be the name of a file beside the store")
        if data.get("eos_id") is not None:
            of.whole("eos_id", at_least=0, at_most=data["vocab_size"] - 1)
        values: dict[str, Any] = {**data, "tokenizer": tokenizer}
        return cls(**values)

    def write(self, path: Path) -> None:
        temporary = temporary_name(path)
        data = asdict(self)
        if self.targets is None:
            del data["targets"]
        temporary.write_text(json.dumps(data, indent=1) + "\n")
        os.replace(temporary, path)


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
    """`prefix` + `suffix`, for prefixes that contain dots as well."""
    return Path(f"{prefix}{suffix}")


def temporary_name(path: Path) -> Path:
    """A unique name in the folder of `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest dtype that Megatron and we write for ids below `vocab_size`."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<i4")


class TokenStoreWriter:
    """Writes a store document by document; a context manager.

    Leaving the block makes the store visible; an exception removes the files and keeps an older
    store of the same name. `preparation` goes to the sidecar and may be extended until then.
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
            raise UserError(f"vocab_size = {vocab_size} must be in [1, 2**31]")
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
        return len(self._lengths)

    def add(self, tokens: IntLike, trained: IntLike | None = None) -> None:
        """Appends one document (shape [num_tokens]); UserError if it cannot be one.

        trained: int64 [k, 2], half-open spans of trained tokens, for all documents of a store or
        for none (then all but the first are). The first token of a document is never a label.
        """
        ids = np.asarray(tokens)
        name = f"document {len(self._lengths)} of {self.prefix}"
        if ids.ndim != 1 or not 1 <= ids.size <= _LONGEST:
            raise UserError(
                f"{name} has shape {ids.shape}; a document is one axis of 1 to {_LONGEST} tokens, "
                f"so leave empty ones out"
            )
        if ids.dtype.kind not in "iu":
            raise UserError(f"{name} has dtype {ids.dtype}; tokens are integers")
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            at = int(np.flatnonzero((ids < 0) | (ids >= self._vocab_size))[0])
            raise UserError(
                f"{name}: token {at} is {ids[at]}, outside the vocabulary [0, {self._vocab_size}); "
                f"use the tokenizer's whole vocab_size, with added tokens"
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
                f"{name} {'lacks' if trained is None else 'has'} trained spans, the documents "
                f"before it do not; give them for all documents of a store (an empty list for none "
                f"trained) or for none"
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
        """Removes the temporary file; no effect after `finish`."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def finish(self) -> StoreInfo:
        """Makes the store visible: removes the old index and renames the files, the index last."""
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
    file.flush()
    os.fsync(file.fileno())
    file.close()


class TokenStore:
    """A store opened for reading; `source_id` is the value of `Documents.source`.

    lengths: int64 tokens of each document, read-only, shape [num_documents]. num_targets: how many
    of them are trained, likewise; all but the first one, where no `.targets` file says otherwise
    (`has_targets`). `StoreReader` reads by the ids that plans use.
    """

    def __init__(self, prefix: str | Path, *, source_id: int = 0) -> None:
        self.prefix = str(prefix)
        self.source_id = source_id
        bin_path, index_path = store_path(prefix, ".bin"), store_path(prefix, ".idx")
        for path in (bin_path, index_path):
            if not path.is_file():
                raise UserError(
                    f"no token store at {self.prefix}: {path} is missing; give the prefix without "
                    f".bin, or make the store with `wlb prepare`"
                )
        index = read_index(index_path, num_bytes=bin_path.stat().st_size)
        self.info = StoreInfo.read(store_path(prefix, ".json"))
        self.dtype = index.dtype
        self.lengths = index.length
        self.num_empty_documents = index.num_empty
        self._start = index.start
        if self.info and self.info.num_tokens != index.num_tokens:
            raise UserError(
                f"{self.prefix}.json describes {self.info.num_tokens} tokens, {index_path} has "
                f"{index.num_tokens}; prepare the store again, or remove the .json if it belongs "
                f"to another store"
            )
        if self.dtype.kind not in "iu":
            raise UserError(f"{bin_path} holds {self.dtype}, tokens are integers; prepare it again")
        whole = index.length.size + index.num_empty
        if self.info and self.info.num_documents != whole:
            raise UserError(
                f"{self.prefix}.json describes {self.info.num_documents} documents, {index_path} "
                f"has {whole}; prepare the store again, or remove the .json if it belongs to "
                f"another store"
            )
        largest = np.iinfo(self.dtype).max
        if self.info and self.info.vocab_size > largest + 1:
            raise UserError(
                f"{self.prefix}.json says {self.info.vocab_size} tokens of vocabulary, {bin_path} "
                f"holds {self.dtype} up to {largest}: larger ids were cut; prepare the store again"
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
            says = "is missing, without which other tokens would be trained"
            if expected is None:
                says = f"is not of this store: {self.prefix}.json does not have its checksum"
            raise UserError(f"{path} {says}; copy or prepare the store again")
        if self.info is None or expected is None:
            return None
        return Targets(path, first=self._start, length=self.lengths, checksum=self.info.checksum)

    @property
    def identity(self) -> dict[str, Any]:
        """Which tokens these are, by the store's description: two stores with equal identities
        train the same. Values are None where it has no description.
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
        """Whether the store says which tokens are trained (`.targets`)."""
        return self._targets is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return self._tokens.size

    @property
    def summary(self) -> str:
        """Documents and tokens, and how many documents were left out because they are empty."""
        return summary_of(self.num_documents, self.num_tokens, self.num_empty_documents)

    @property
    def vocab_size(self) -> int | None:
        """Vocabulary size from the sidecar; None without one: then set model.vocab_size."""
        return self.info.vocab_size if self.info else None

    @property
    def eos_id(self) -> int | None:
        """The token that ends every document; None if it is not known."""
        return self.info.eos_id if self.info else None

    def read(self, document: int, start: int = 0, stop: int | None = None) -> TokenArray:
        """Tokens [start, stop) of a document as a read-only view of the mapped file."""
        num = self.lengths.size
        if not 0 <= document < num:
            raise UserError(f"document {document} is not in {self.prefix}, which has {num}")
        length = int(self.lengths[document])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise UserError(
                f"tokens [{start}, {stop}) are not in document {document} of {self.prefix}, which "
                f"has {length} tokens"
            )
        first = int(self._start[document])
        return self._tokens[first + start : first + stop]

    def trained(self, document: int, start: int = 0, stop: int | None = None) -> BoolArray:
        """Whether each of the tokens [start, stop) of a document is trained, shape [stop - start].

        As labels: each from the token before it, so token 0 never is.
        """
        # `read` raises UserError for tokens that do not exist.
        size = self.read(document, start, stop).size
        if self._targets is not None:
            return self._targets.trained(document, start, start + size)
        out = np.ones(size, bool)
        out[: max(0, 1 - start)] = False
        return out

    def count_targets(self, document: IntLike, start: IntLike, stop: IntLike) -> IntArray:
        """Labels of the pieces [start, stop) of `document`, each of shape [num_pieces].

        The label of a piece's last token is the document's token `stop`, if it has one.
        """
        if self._targets is not None:
            return self._targets.count(document, start, stop)
        rows = np.asarray(document, np.int64)
        last = np.minimum(np.asarray(stop, np.int64), self.lengths[rows] - 1)
        return last - np.asarray(start, np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(TokenStore, source_id=self.source_id), (self.prefix,)

    def __repr__(self) -> str:
        return f"TokenStore({self.prefix!r}, {self.summary}, {self.dtype})"


def summary_of(num_documents: int, num_tokens: int, num_empty: int) -> str:
    """Sizes of a store in words."""
    empty = f"{num_empty:,} empty document{'s' if num_empty > 1 else ''} left out"
    sizes = f"{num_documents:,} documents, {num_tokens:,} tokens"
    return f"{sizes}, {empty}" if num_empty else sizes


def file_checksum(path: Path) -> str:
    """blake2b of a file, 32 bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
