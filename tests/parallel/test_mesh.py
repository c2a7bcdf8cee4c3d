"""Tests the coordinates of ranks, and the mesh on real processes."""

import pytest
import torch
import torch.distributed as dist

from wlb.launch.local import run_local
from wlb.parallel import mesh
from wlb.parallel import world as worlds
from wlb.spec.run import ParallelSpec

SIXTEEN = ParallelSpec(tp=2, cp=2, pp=2, dp=2)


def test_ranks_count_tp_cp_pp_dp_from_the_inside_out():
    assert mesh.coordinates(0, SIXTEEN) == (0, 0, 0, 0)
    assert mesh.coordinates(5, SIXTEEN) == mesh.Coordinates(tp=1, cp=0, pp=1, dp=0)
    assert mesh.coordinates(10, SIXTEEN) == mesh.Coordinates(tp=0, cp=1, pp=0, dp=1)
    assert mesh.rank_grid(SIXTEEN).tolist() == [
        [[[0, 1], [2, 3]], [[8, 9], [10, 11]]],
        [[[4, 5], [6, 7]], [[12, 13], [14, 15]]],
    ]


def test_grid_and_coordinates_agree_on_an_uneven_layout():
    parallel = ParallelSpec(tp=2, cp=3, pp=4, dp=5)
    grid = mesh.rank_grid(parallel)
    for rank in range(120):
        tp, cp, pp, dp = mesh.coordinates(rank, parallel)
        assert grid[pp, dp, cp, tp] == rank


def test_a_rank_outside_the_layout_is_refused():
    with pytest.raises(ValueError, match="rank 16 is outside the 16 ranks"):
        mesh.coordinates(16, SIXTEEN)


def test_one_process_has_a_mesh_too():
    worlds.init(worlds.World(), torch.device("cpu"), timeout_s=600)
    try:
        one = mesh.build_mesh(ParallelSpec(dp=1), torch.device("cpu"))
        assert one.at == (0, 0, 0, 0)
        assert one.world_size == one.fsdp_size == dist.get_world_size(one.group("fsdp")) == 1
        with pytest.raises(ValueError, match="tp 2 x cp 1 x pp 1 x dp 1 is not the 1 ranks"):
            mesh.build_mesh(ParallelSpec(tp=2, dp=1), torch.device("cpu"))
    finally:
        worlds.shutdown()
    worlds.shutdown()  # a second time does nothing


def _groups(world: worlds.World, parallel: ParallelSpec) -> dict[str, list[int]]:
    built = mesh.build_mesh(parallel, torch.device("cpu"))
    assert built.at == mesh.coordinates(world.rank, parallel)
    assert dist.get_rank(built.group("fsdp")) == built.fsdp_rank
    assert dist.get_world_size() == built.world_size
    groups = {
        "tp": built.group("tp"),
        "cp": built.group("cp"),
        "pp": built.group("pp"),
        "dp": built.group("dp"),
        "fsdp": built.group("fsdp"),
    }
    total = torch.tensor([world.rank])
    dist.all_reduce(total, group=built.group("fsdp"))
    members = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    assert int(total) == sum(members["fsdp"])
    return members


@pytest.mark.full
@pytest.mark.dist
def test_eight_ranks_form_the_groups_of_the_layout():
    parallel = ParallelSpec(tp=2, cp=2, pp=1, dp=2)
    groups = run_local(_groups, 8, parallel, start_group=True, timeout_s=600)
    assert groups[5] == {"tp": [4, 5], "cp": [5, 7], "pp": [5], "dp": [1, 5], "fsdp": [1, 3, 5, 7]}
    pipelines = run_local(
        _groups, 8, ParallelSpec(cp=2, pp=2, dp=2), start_group=True, timeout_s=600
    )
    assert pipelines[5] == {
        "tp": [5],
        "cp": [4, 5],
        "pp": [5, 7],
        "dp": [1, 5],
        "fsdp": [0, 1, 4, 5],
    }
