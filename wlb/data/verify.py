"""Holds a store's files against what its description says of them, and reads them whole for it.

`identity` tells from descriptions alone which tokens a run trains; `check_store` proves that the
files are those. Cost: about a second a GB, once, and no memory.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wlb.data.store import TokenArray, TokenStore, file_checksum, store_path
from wlb.plan import UserError
from wlb.plan.arrays import first_true

_BLOCK_BYTES = 1 << 23
_FILES = (".bin", ".idx", ".targets", ".json")


@dataclass(frozen=True, slots=True)
class StoreSums:
    """Sums of a store's files as they were read: blake2b of the tokens and of the trained spans
    (None without), and each file's size and times, by which a later change is noticed.
    """

    tokens: str
    targets: str | None
    stamps: dict[str, list[int]]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a run's record."""
        return asdict(self)


def stamps_of(prefix: str) -> dict[str, list[int]]:
    """Bytes, and times of the last change of content and of the file, in ns, by suffix."""
    paths = {end: store_path(prefix, end) for end in _FILES}
    found = {end: path.stat() for end, path in paths.items() if path.exists()}
    return {end: [s.st_size, s.st_mtime_ns, s.st_ctime_ns] for end, s in found.items()}


def check_store(store: TokenStore, progress: Callable[[int], None] = lambda _: None) -> StoreSums:
    """Read a store whole. UserError unless all its tokens are of its vocabulary and its files have
    the checksums of its description, as far as there is one.

    progress: is called with the bytes read after each block of 8 MiB; what it raises ends the call.
    """
    stamps = stamps_of(store.prefix)
    tokens, outside = _read_tokens(store, progress)
    info, targets = store.info, None
    if info is not None:
        _hold(store, store_path(store.prefix, ".bin"), tokens, info.checksum, "tokens")
    if info is not None and info.targets is not None:
        path = store_path(store.prefix, ".targets")
        targets = file_checksum(path)
        _hold(store, path, targets, info.targets, "trained tokens")
    if outside:
        raise UserError(outside)
    return StoreSums(tokens, targets, stamps)


def verify_store(prefix: str) -> None:
    """UserError unless the store has its checksum and only tokens of its vocabulary."""
    store = TokenStore(prefix)
    if store.info is None:
        path = store_path(prefix, ".bin")
        raise UserError(f"{path} has no checksum: {prefix}.json is missing")
    check_store(store)


def _read_tokens(store: TokenStore, progress: Callable[[int], None]) -> tuple[str, str]:
    """blake2b of `.bin`, and what is wrong with the first token outside the vocabulary, or ""."""
    path, total, done = store_path(store.prefix, ".bin"), hashlib.blake2b(digest_size=32), 0
    outside = ""
    block = bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(block):
            # A file system may give less than was asked for, so what is left is read as well.
            while read < len(block) and (more := file.readinto(memoryview(block)[read:])):
                read += more
            total.update(memoryview(block)[:read])
            tokens = np.frombuffer(block, store.dtype, count=read // store.dtype.itemsize)
            first = done // store.dtype.itemsize
            outside = outside or _outside(store, tokens, first)
            done += read
            progress(done)
    return total.hexdigest(), outside


def _outside(store: TokenStore, tokens: TokenArray, first: int) -> str:
    """What is wrong with the first of `tokens` outside the vocabulary; "" if all are in it."""
    limit = store.vocab_size
    at = first_true(tokens < 0 if limit is None else (tokens < 0) | (tokens >= limit))
    if at is None:
        return ""
    of = f"the vocabulary [0, {limit}) of {store.prefix}.json" if limit else "all vocabularies"
    path = store_path(store.prefix, ".bin")
    return f"{path}: token {first + at} is {tokens[at]}, outside {of}; prepare the store again"


def _hold(store: TokenStore, path: Path, found: str, expected: str, what: str) -> None:
    if found != expected:
        raise UserError(
            f"{path} has checksum {found[:16]}..., {store.prefix}.json says "
            f"{expected[:16]}...; the {what} changed, so prepare the store again"
        )
