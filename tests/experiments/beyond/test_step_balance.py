"""Tests the comparison of one step's balance: its judge, its lengths, and how peers are found."""

import zipfile
from pathlib import Path

import numpy as np
import pytest

from experiments.beyond.step_balance.cells import cell, score
from experiments.beyond.step_balance.families import FAMILIES, draw, files
from experiments.beyond.step_balance.peers import MAKERS, Peer, found_peers
from experiments.beyond.step_balance.sources import Missing, Sources
from experiments.beyond.step_balance.tables import aims, rows_of, speed, summary
from wlb.plan import UserError

PACKER = """
import math, numba
from areal.utils import logging
logger = logging.getLogger("x")

def balanced_greedy_partition(nums, K):
    return [list(range(i, len(nums), K)) for i in range(K)]

def ffd_allocate(values, capacity, min_groups, n_groups_divisor=1):
    num = max(min_groups, math.ceil(sum(values) / capacity) + 1)
    return [list(range(i, len(values), num)) for i in range(num)]
"""


def test_a_division_is_judged_by_its_slots() -> None:
    """Work is 24,576 tokens + tokens^2: of 1 and 2 tokens 24,577 and 49,156."""
    lengths = np.array([1, 1, 2, 2])
    good = score([[[[0], [2]], [[1], [3]]]], lengths, 2, 0.0)
    assert (good.wait, good.step, good.micro_batches, good.over) == (1.0, 1.0, 2, 0)
    crossed = score([[[[0], [2]], [[3], [1]]]], lengths, 2, 0.0)
    assert crossed.wait == pytest.approx(2 * 49_156 / (24_577 + 49_156))
    assert crossed.step == 1.0
    assert score([[[[0, 2]], [[1, 3]]]], lengths, 2, 0.0).over == 2
    with pytest.raises(ValueError, match="4 samples became 3"):
        score([[[[0], [2]], [[1], []]]], lengths, 2, 0.0)


def test_families_are_drawn_alike_again() -> None:
    for family in FAMILIES:
        lengths = draw(family, 500, seed=3)
        assert np.array_equal(lengths, draw(family, 500, seed=3))
        assert not np.array_equal(lengths, draw(family, 500, seed=4))
        assert lengths.min() >= 1
    assert (draw("code", 2000, seed=0) == 17000).mean() == pytest.approx(0.03, abs=0.02)


def test_files_of_real_lengths(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("3\n4\n5\n")
    (tmp_path / "b.json").write_text("[6, 7]")
    np.save(tmp_path / "c.npy", np.array([8]))
    assert [(name, lengths.tolist()) for name, lengths in files(tmp_path)] == [
        ("a", [3, 4, 5]), ("b", [6, 7]), ("c", [8]),
    ]  # fmt: skip
    (tmp_path / "d.txt").write_text("words")
    with pytest.raises(UserError, match=r"d\.txt is not a list of lengths"):
        list(files(tmp_path))


def test_peers_come_from_wheels_and_missing_ones_say_how_to_get_them(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "areal-1.0.4-py3-none-any.whl", "w") as wheel:
        wheel.writestr("areal/utils/seqpack.py", PACKER)
    areal = MAKERS["AReaL"](Sources(tmp_path))
    assert (areal.name, areal.version) == ("AReaL", "1.0.4")
    parts = areal.divide([5] * 16, 2, 25)
    assert sorted(i for rank in parts for part in rank for i in part) == list(range(16))
    with pytest.raises(Missing, match=r"git clone .*/RL FOLDER/RL"):
        MAKERS["NeMo-RL"](Sources(tmp_path))
    peers, missing = found_peers(Sources(tmp_path))
    assert {*missing, *(peer.name for peer in peers)} == set(MAKERS)
    assert all("FOLDER" in how for how in missing.values())


def test_tables_of_one_small_cell() -> None:
    def in_turn(lengths: list[int], ranks: int, cap: int) -> list[list[list[int]]]:
        return [[[i] for i in range(rank, len(lengths), ranks)] for rank in range(ranks)]

    peers = [Peer(name="in turn", version="1", divide=in_turn)]
    cells = [cell("math", draw("math", 64, seed=0), 4, 2, peers)]
    assert cells[0].scores["wlb"].wait < cells[0].scores["in turn"].wait
    several = [cell("math", draw("math", 64, seed=0), 4, 2, peers, mini_batches=4)]
    assert "in turn" not in several[0].scores, "it has no mini-batches"
    rows = {row[0]: row for row in summary("s", "S", cells, peers).rows}
    assert rows["wlb"][6:10] == [0, 1.0, 0, 0]
    assert rows["in turn"][7] > 1
    assert len(rows_of(cells, peers).rows) == len(speed(cells).rows) == 1
    shown = aims(cells, several, np.array([1.25]), np.array([1.5]))
    assert "Micro-batches over the cap: 0 " in shown.note
    assert {row[0]: row[2:] for row in shown.rows}["ranks wait once a step"] == [1, 1.5, 1.25, 1.2]
    assert shown.rows[0][3] == cells[0].scores["wlb"].wait
