"""Tests the coordinates of ranks, and the mesh on real processes."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from wlb.launch.local import run_local
from wlb.parallel import mesh
from wlb.parallel import world as worlds
from wlb.parallel.grid import kind_of_link, link_members
from wlb.parallel.tensor import placement
from wlb.spec import ModelSpec
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
    with pytest.raises(ValueError, match="rank = 16 must be from 0 to 15,"):
        mesh.coordinates(16, SIXTEEN)


def test_one_process_has_a_mesh_too():
    worlds.init(worlds.World(), torch.device("cpu"), timeout_s=600)
    try:
        one = mesh.build_mesh(ParallelSpec(dp=1), torch.device("cpu"))
        assert one.at == (0, 0, 0, 0)
        assert one.world_size == one.fsdp_size == dist.get_world_size(one.group("fsdp")) == 1
        with pytest.raises(
            ValueError,
            match=(
                r"parallel\.tp = 2 .* parallel\.dp = 1 must equal the number of ranks that run, 1;"
            ),
        ):
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
    if parallel.pp > 1:
        groups |= {"before": built.link_before, "after": built.link_after}
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
        "before": [5, 7],
        "after": [5, 7],
    }


def _copies(world: worlds.World) -> tuple[list[int], list[int], list[str]]:
    parallel = ParallelSpec(tp=4, dp=1)
    model = ModelSpec(num_kv_heads=2)
    built = mesh.build_mesh(parallel, torch.device("cpu"), model=model)
    assert built.kv_heads is not None
    copies = built.kv_heads.get_group(mesh.KV_COPY)
    assert copies in built.groups
    used = [name for name, _ in mesh.used_groups(built)]
    both = [placement(f"layers.0.self_attn.{m}.weight", built) for m in ("k_proj", "q_proj")]
    parts = [p.part_of(torch.arange(8)).tolist() for p in both]
    assert [p.is_copy for p in both] == [world.rank % 2 == 1, False]
    return dist.get_process_group_ranks(copies), parts[0] + parts[1], used


@pytest.mark.dist
def test_neighbours_hold_copies_of_a_kv_head() -> None:
    """Rank r's query heads are part r of 4, which read KV head r // 2."""
    for rank, (copies, parts, used) in enumerate(run_local(_copies, 4, start_group=True)):
        head = rank // 2
        assert copies == [2 * head, 2 * head + 1]
        assert parts == [*range(4 * head, 4 * head + 4), 2 * rank, 2 * rank + 1]
        assert used == ["world", mesh.KV_COPY]


def _links(world: worlds.World, parallel: ParallelSpec) -> tuple[list[int], list[int], list[str]]:
    built = mesh.build_mesh(parallel, torch.device("cpu"))
    before, after = built.link_before, built.link_after
    # The two are communicators of their own, also where both lead to the same rank.
    assert before.group_name != after.group_name
    assert {*built.links.values()} <= {*built.groups}
    for link, way in ((before, -1), (after, 1)):
        assert dist.get_process_group_ranks(link) == sorted(
            parallel.cp * ((built.at.pp + i) % parallel.pp) + built.at.cp for i in (0, way)
        )
    # Each pair adds its ranks; members that disagree on a link's name or order would hang.
    total = torch.tensor([world.rank])
    for link in built.links.values():
        dist.all_reduce(total, group=link)
    used = [name for name, _ in mesh.used_groups(built)]
    return [int(total)], dist.get_process_group_ranks(after), used


@pytest.mark.dist
@pytest.mark.parametrize("pp", [2, pytest.param(3, marks=pytest.mark.full)])
def test_each_link_of_a_pipeline_has_a_group_of_its_two_ranks(pp: int) -> None:
    parallel = ParallelSpec(cp=2, pp=pp, dp=1)
    found = run_local(_links, 2 * pp, parallel, start_group=True, timeout_s=600)
    kinds = ["pp_even", "pp_odd", "pp_last"]
    for rank, (_, after, used) in enumerate(found):
        assert after == sorted((rank, (rank + 2) % (2 * pp)))
        at = rank // 2
        own = [kinds[:2]] * 2 if pp == 2 else [["pp_even", "pp_last"], kinds[:2], kinds[1:]]
        assert used == ["world", *own[at], "cp", "fsdp"]


def test_nccl_makes_all_links_of_a_kind_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a device is bound, as `world.init` binds it, they are split off the world."""
    asked: list[tuple[str, list[list[int]]]] = []

    class Group:
        bound_device_id = torch.device("cuda", 0)

    def split_group(**options: Any) -> Group:
        inspect.signature(dist.split_group).bind(**options)  # of the torch that is installed
        asked.append((options["group_desc"], options["split_ranks"]))
        return Group()

    torch_dist = SimpleNamespace(
        group=SimpleNamespace(WORLD=Group()), ProcessGroup=Group, split_group=split_group
    )
    monkeypatch.setattr(mesh, "dist", torch_dist)
    for kind, parts in link_members(ParallelSpec(pp=3, dp=2)).items():
        mesh._group_of(parts, kind)
    assert asked == [
        ("pp_even", [[0, 1], [3, 4], [2], [5]]),
        ("pp_odd", [[1, 2], [4, 5], [0], [3]]),
        ("pp_last", [[0, 2], [3, 5], [1], [4]]),
    ]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 3))
def test_links_join_each_pipeline_in_a_ring(tp: int, cp: int, pp: int, dp: int) -> None:
    parallel = ParallelSpec(tp=tp, cp=cp, pp=pp, dp=dp)
    members = link_members(parallel)
    for parts in members.values():
        assert sorted(rank for part in parts for rank in part) == [*range(parallel.world_size)]
    grid = mesh.rank_grid(parallel)
    for link in range(pp if pp > 1 else 0):
        parts = members[kind_of_link(link, pp)]
        for one, other in zip(grid[link].ravel(), grid[(link + 1) % pp].ravel(), strict=True):
            assert sorted((int(one), int(other))) in parts
    pairs = sum(len(part) == 2 for parts in members.values() for part in parts)
    assert pairs == (parallel.world_size if pp > 1 else 0)
