"""Tests the file of ranks' positions: who writes it and who reads it agree, whatever is torn."""

import os
from pathlib import Path

import pytest

from wlb.launch.position import Position, SlotOwner, read_positions


def owner(rank: int, *, words: str = "here") -> SlotOwner:
    """Returns that of a rank of two nodes with two ranks each."""
    return SlotOwner(
        rank=rank,
        world_size=4,
        local_rank=rank % 2,
        local_world_size=2,
        node_rank=rank // 2,
        words=words,
    )


def test_a_reader_finds_each_rank_where_it_is(tmp_path: Path) -> None:
    positions = [Position.opened(tmp_path, owner(rank)) for rank in (0, 1, 3)]
    positions[1].enter("computing", step=12)
    positions[1].chunk("backward", 0, 3)
    positions[2].enter("saving a checkpoint", step=12)
    positions[2].end()
    seen = read_positions(tmp_path)
    assert sorted(seen) == [0, 1, 3]
    assert len(list(tmp_path.iterdir())) == 2  # one file a node
    assert seen[0].describe() == "before the first step: starting"
    assert seen[1].describe() == "step 12, micro-batch 3 (backward, stage 0): computing"
    assert seen[3].describe() == "step 12: saving a checkpoint"
    assert [seen[rank].has_ended for rank in (0, 1, 3)] == [False, False, True]
    assert (seen[1].pid, seen[1].world_size, seen[1].place) == (os.getpid(), 4, "here")
    assert seen[1] == positions[1].now()


def test_texts_that_are_too_long_are_cut(tmp_path: Path) -> None:
    position = Position.opened(tmp_path, owner(0, words="é" * 500))
    position.enter("x" * 500)
    position.chunk("y" * 500, 1, 2)
    seen = read_positions(tmp_path)[0]
    assert seen.place.startswith("é" * 80)
    assert (len(seen.doing), len(seen.kind), seen.micro_batch) == (96, 16, 2)


@pytest.mark.parametrize("cut", [0, 100, 300, 511, 512, 700])
def test_no_byte_of_a_torn_file_harms_its_reader(tmp_path: Path, cut: int) -> None:
    for rank in (0, 1):
        Position.opened(tmp_path, owner(rank)).enter("computing", step=7)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    assert len(read_positions(tmp_path)) == cut // 512
    for begin in range(4, 512):
        # The half of a change that has been written, with bytes that no field expects.
        path.write_bytes(whole[:begin] + b"\xff" * (512 - begin) + whole[512:])
        seen = read_positions(tmp_path)
        assert all(each.describe() for each in seen.values())


def test_a_file_of_another_version_is_not_read(tmp_path: Path) -> None:
    Position.opened(tmp_path, owner(0))
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"\x00" * 4 + path.read_bytes()[4:])
    assert read_positions(tmp_path) == {}
    assert read_positions(tmp_path / "none") == {}
