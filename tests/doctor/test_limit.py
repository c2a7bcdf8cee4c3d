"""Tests that a stage that does not end names the ranks that have not ended it."""

import threading

import pytest
import torch.distributed as dist

from wlb.doctor import limit as limits
from wlb.doctor.finding import UNFIT
from wlb.doctor.limit import StageLimit


class SharedStore(dist.HashStore):
    def clone(self) -> "SharedStore":
        return self


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SharedStore:
    made = SharedStore()
    monkeypatch.setattr(limits.distributed_c10d, "_get_default_store", lambda: made)
    monkeypatch.setattr(limits.dist, "get_world_size", lambda: 3)
    return made


def rank(number: int, limit_s: float = 600.0) -> tuple[StageLimit, list, threading.Event]:
    told: list = []
    ended = threading.Event()
    made = StageLimit(
        number, limit_s, lambda *late: told.append(late), end=lambda code: end(code, ended)
    )
    return made, told, ended


def end(code: int, ended: threading.Event) -> None:
    assert code == UNFIT
    ended.set()


def test_ranks_that_have_not_ended_the_first_open_stage_are_named(store: SharedStore) -> None:
    ranks = [rank(number)[0] for number in range(3)]
    for one in ranks:
        one.join()
        with one.stage("facts"):
            pass
    for one in (ranks[0], ranks[2]):
        with one.stage("node"):
            pass
    with ranks[0].stage("waiting"):  # rank 2 waits as well, for rank 1
        assert ranks[0].missing() == ("node", [1])


def test_a_stage_out_of_time_is_told_once_by_rank_0_and_ends_the_process() -> None:
    one, told, ended = rank(0, limit_s=0.01)
    with one.stage("driver"):
        assert ended.wait(60)
    assert told == [("driver", [0])]
    other, told, ended = rank(1, limit_s=0.01 - limits.GRACE_S)
    with other.stage("driver"):
        assert ended.wait(60)
    assert told == []


def test_a_stage_in_time_ends_nothing() -> None:
    one, told, ended = rank(0)
    with one.stage("driver"):
        pass
    assert not ended.is_set()
    assert told == []
