"""Verify a store: read all its tokens and compare checksums with those in its description.

Opening a store trusts the checksums in its description without reading the tokens
(`TokenStore.identity`). `check_store` proves that the files still have these checksums.
Cost: about one second per GB, and a buffer of 8 MiB.
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
    """Checksums of a store's files, and their sizes and times when they were read."""

    tokens: str  # blake2b of the `.bin` file, in hexadecimal
    targets: str | None  # blake2b of the `.targets` file, None if there is no such file
    stamps: dict[str, list[int]]  # size and times of each file, from `stamps_of`

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values for JSON."""
        return asdict(self)


def stamps_of(prefix: str) -> dict[str, list[int]]:
    """Return the size and times of each of a store's files, to detect changes without reading them.

    Returns:
        For each suffix such as ".bin": size in bytes, modification time in ns, and inode change
        time in ns.
    """
    paths = {end: store_path(prefix, end) for end in _FILES}
    found = {end: path.stat() for end, path in paths.items() if path.exists()}
    return {end: [s.st_size, s.st_mtime_ns, s.st_ctime_ns] for end, s in found.items()}


def check_store(store: TokenStore, progress: Callable[[int], None] = lambda _: None) -> StoreSums:
    """Read a whole store and check its tokens and checksums.

    A store without a description has no checksums; its tokens must not be negative.

    Args:
        store: The store.
        progress: Called after each block of 8 MiB with the number of bytes read so far. It may
            raise an exception to stop the check.

    Returns:
        The checksums of the files, and the sizes and times that the files had before the check.

    Raises:
        UserError: A token is outside the vocabulary, or a checksum differs from the description.
    """
    # Record sizes and times before reading, so that a change during reading can be detected later.
    stamps = stamps_of(store.prefix)
    tokens, outside = _read_tokens(store, progress)
    info, targets = store.info, None
    if info is not None:
        _compare(store, store_path(store.prefix, ".bin"), tokens, info.checksum, "tokens")
    if info is not None and info.targets is not None:
        path = store_path(store.prefix, ".targets")
        targets = file_checksum(path)
        _compare(store, path, targets, info.targets, "trained tokens")
    if outside:
        raise UserError(outside)
    return StoreSums(tokens, targets, stamps)


def verify_store(prefix: str) -> None:
    """Raise UserError unless all tokens of a store are valid and its checksums are correct.

    Args:
        prefix: Path of the store's files without their suffixes.
    """
    store = TokenStore(prefix)
    if store.info is None:
        path = store_path(prefix, ".bin")
        raise UserError(
            f"{path} cannot be verified, because the file {prefix}.json with its checksum is "
            f"missing; copy or prepare the store again"
        )
    check_store(store)


def _read_tokens(store: TokenStore, progress: Callable[[int], None]) -> tuple[str, str]:
    """Read the whole `.bin` file, compute its checksum and check its tokens.

    Args:
        store: The store.
        progress: Called after each block with the number of bytes read so far.

    Returns:
        The blake2b hash in hexadecimal, and an error message about the first token outside of the
        vocabulary, or "" if all tokens are valid.
    """
    path, total, done = store_path(store.prefix, ".bin"), hashlib.blake2b(digest_size=32), 0
    outside = ""
    block = bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(block):
            # A file system may return fewer bytes than requested, so read on until the block is
            # full.
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
    """Return an error message about the first token outside the vocabulary, or "".

    Args:
        store: The store, which knows the vocabulary.
        tokens: Consecutive tokens of the `.bin` file.
        first: Position of `tokens[0]` in the `.bin` file.
    """
    limit = store.vocab_size
    at = first_true(tokens < 0 if limit is None else (tokens < 0) | (tokens >= limit))
    if at is None:
        return ""
    of = f"the vocabulary [0, {limit}) of {store.prefix}.json" if limit else "every vocabulary"
    path = store_path(store.prefix, ".bin")
    return f"{path}: token {first + at} is {tokens[at]}, outside {of}; prepare the store again"


def _compare(store: TokenStore, path: Path, found: str, expected: str, what: str) -> None:
    if found != expected:
        raise UserError(
            f"{path} has checksum {found[:16]}..., but {store.prefix}.json says "
            f"{expected[:16]}...; the {what} changed, so prepare the store again"
        )
