"""Tests how many rows the members of an EP group exchange in a rehearsal."""

from dataclasses import replace

from wlb.parallel.mesh import Coordinates
from wlb.rehearse.equal_experts import EqualLoads, GroupRows, pipelines_of_group
from wlb.spec import ParallelSpec, load


def test_rows_of_a_group_are_divided_alike_on_both_sides() -> None:
    loads = EqualLoads(load("qwen3_moe_demo", ["model.experts.per_token=2", "parallel.ep=1"]))
    loads.now = GroupRows(num=5, of_members=(5, 0, 7))
    # 10, 0 and 14 copies over three members: 4 3 3, none, and 5 4 5 from the last one on.
    assert [loads.split(1, 3, rank) for rank in range(3)] == [
        ([[4, 0, 5]], [[4, 3, 3]]),
        ([[3, 0, 4]], [[0, 0, 0]]),
        ([[3, 0, 5]], [[5, 4, 5]]),
    ]
    # In two stages each number is divided alike where it leaves and where it arrives.
    assert loads.split(2, 3, 0) == ([[2, 0, 2], [2, 0, 3]], [[2, 1, 1], [2, 2, 2]])
    parallel = ParallelSpec(tp=2, cp=2, pp=3, dp=4, ep=8)
    at = Coordinates(tp=1, cp=0, pp=1, dp=3)
    assert pipelines_of_group(parallel, at) == [2] * 4 + [3] * 4
    assert pipelines_of_group(replace(parallel, ep=2), at) == [3, 3]
