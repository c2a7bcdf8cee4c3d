"""Tests the orders of passes that wlb changes in torch's schedules."""

from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import (
    FORWARD,
    RESHARD,
    UNSHARD,
    _Action,
    _add_unshard_reshard,
)

from wlb.parallel.pipeline import gathered_once


def kinds_of(actions: list[_Action], stage: int) -> list[str]:
    return [str(a.computation_type) for a in actions if a.stage_index == stage]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=24))
def test_a_stage_is_gathered_once_around_all_of_its_passes(stages: list[int]) -> None:
    passes: list[_Action | None] = [_Action(s, FORWARD, i) for i, s in enumerate(stages)]
    found = gathered_once(_add_unshard_reshard(passes))
    assert [a for a in found if a.computation_type == FORWARD] == passes
    for stage in set(stages):
        first, *own, last = kinds_of(found, stage)
        assert (first, last) == (str(UNSHARD), str(RESHARD))
        assert set(own) == {str(FORWARD)}


def test_torch_alone_gathers_a_fourth_stage_again() -> None:
    passes: list[_Action | None] = [_Action(s, FORWARD, s) for s in (0, 1, 2, 3)]
    passes += [_Action(s, FORWARD, 4 + s) for s in (0, 1, 2, 3)]
    gathers = [a for a in _add_unshard_reshard(passes) if a.computation_type == UNSHARD]
    assert len(gathers) > 4
