"""Tests that a store's files are held against its description: checksums, vocabulary, changes."""

import os

import numpy as np
import pytest

from tests.data.test_store import write
from wlb.data import TokenStore, TokenStoreWriter, check_store, stamps_of, verify_store
from wlb.data import verify as verify_module
from wlb.data.store import store_path
from wlb.plan import UserError


def test_verify_finds_a_changed_token(tmp_path):
    store = write(tmp_path / "s", [[1, 2, 3]])
    verify_store(store.prefix)
    (tmp_path / "s.bin").write_bytes(b"\x01\x00\x09\x00\x03\x00")
    with pytest.raises(ValueError, match="the tokens changed, so prepare the store again"):
        verify_store(str(tmp_path / "s"))
    (tmp_path / "s.json").unlink()
    with pytest.raises(
        ValueError, match=r"cannot be verified, because .*s\.json with its checksum is missing"
    ):
        verify_store(str(tmp_path / "s"))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("at", [0, 4097, -1])
@pytest.mark.parametrize("block", [8, 4096, 1 << 23])
def test_one_flipped_bit_is_found_wherever_it_is(tmp_path, monkeypatch, at, block):
    monkeypatch.setattr(verify_module, "_BLOCK_BYTES", block)
    store = write(tmp_path / "s", [list(range(200))] * 25)
    seen = []
    sums = check_store(store, seen.append)
    assert sums.tokens == store.info.checksum
    assert seen[-1] == store_path(store.prefix, ".bin").stat().st_size
    flip(tmp_path / "s.bin", at)
    with pytest.raises(UserError, match=r"the tokens changed|outside the vocabulary"):
        check_store(TokenStore(tmp_path / "s"))


def test_a_moved_span_of_trained_tokens_is_found(tmp_path):
    with TokenStoreWriter(tmp_path / "s", vocab_size=300) as writer:
        writer.add([1, 2, 3], [(1, 2)])
        writer.add([4, 5], [(1, 2)])
    store = TokenStore(tmp_path / "s")
    assert check_store(store).targets == store.info.targets
    flip(tmp_path / "s.targets", -8)
    with pytest.raises(UserError, match=r"trained tokens changed|s\.targets"):
        check_store(TokenStore(tmp_path / "s"))


def test_a_store_without_a_description_has_only_its_own_checksum(tmp_path):
    write(tmp_path / "s", [[1, 2, 3]])
    (tmp_path / "s.json").unlink()
    before = check_store(TokenStore(tmp_path / "s"))
    flip(tmp_path / "s.bin", 2)
    after = check_store(TokenStore(tmp_path / "s"))
    assert before.targets is after.targets is None
    assert before.tokens != after.tokens


def test_tokens_below_0_are_of_no_vocabulary(tmp_path):
    write(tmp_path / "s", [[1, 2, 3]], vocab_size=70_000)
    (tmp_path / "s.json").unlink()
    (tmp_path / "s.bin").write_bytes(np.array([1, -5, 3], "<i4").tobytes())
    with pytest.raises(UserError, match=r"token 1 is -5, outside every vocabulary"):
        check_store(TokenStore(tmp_path / "s"))


def test_a_change_shows_in_the_stamps(tmp_path):
    write(tmp_path / "s", [[1, 2, 3]])
    before = stamps_of(str(tmp_path / "s"))
    assert before == stamps_of(str(tmp_path / "s"))
    times = (tmp_path / "s.bin").stat()
    flip(tmp_path / "s.bin", 0)
    os.utime(tmp_path / "s.bin", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert stamps_of(str(tmp_path / "s")) != before


def test_what_progress_raises_ends_it(tmp_path):
    def stop(_: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        check_store(write(tmp_path / "s", [[1]]), stop)
