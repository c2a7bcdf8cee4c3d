"""Tests that every communicator is used once before the first step, and what is found then."""

import pytest
import torch
import torch.distributed as dist

from wlb.launch.local import RankFailure, run_local
from wlb.parallel import collectives, mesh
from wlb.parallel import world as worlds
from wlb.parallel.connect import warm
from wlb.spec.run import ParallelSpec

CPU = torch.device("cpu")


def _warmed(world: worlds.World, parallel: ParallelSpec, shard_size: int) -> object:
    built = mesh.build_mesh(parallel, CPU, shard_size=shard_size)
    done = warm(built, all_to_all=True)
    dist.barrier()  # nothing is left in a communicator that later calls would receive
    assert done.seconds > 0
    return done.communicators, done.links


@pytest.mark.dist
@pytest.mark.parametrize(
    ("parallel", "shard_size", "expected"),
    [
        # World, tp, cp and fsdp: the last two have the same ranks, and a group each.
        (ParallelSpec(tp=2, cp=2, dp=1), 0, [(4, 0)] * 4),
        # World and two links: two pipeline ranks are each other's neighbours on both sides.
        pytest.param(ParallelSpec(pp=2, dp=1), 0, [(3, 2)] * 2, marks=pytest.mark.full),
        pytest.param(ParallelSpec(pp=3, dp=1), 0, [(3, 2)] * 3, marks=pytest.mark.full),
        # HSDP: world, replicate, shard.
        pytest.param(ParallelSpec(dp=4), 2, [(3, 0)] * 4, marks=pytest.mark.full),
    ],
)
def test_each_communicator_that_steps_use_is_used_once(
    parallel: ParallelSpec, shard_size: int, expected: list[tuple[int, int]]
) -> None:
    call = (_warmed, parallel.world_size, parallel, shard_size)
    assert run_local(*call, start_group=True, timeout_s=600) == expected


def _broken(world: worlds.World, parallel: ParallelSpec, call: str) -> None:
    built = mesh.build_mesh(parallel, CPU)
    if world.rank == 1:
        right = getattr(collectives, call)
        setattr(collectives, call, lambda *args: right(*args) + 1)
    warm(built, all_to_all=True)


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.parametrize(
    ("parallel", "call", "name"),
    [
        (ParallelSpec(tp=2, dp=1), "all_gather", "world"),
        (ParallelSpec(pp=2, dp=1), "all_gather", "world"),
        (ParallelSpec(cp=2, dp=1), "all_to_all", "cp"),
    ],
)
def test_a_communicator_that_carries_wrong_values_is_named(
    parallel: ParallelSpec, call: str, name: str
) -> None:
    wrong = rf"rank 1 .*wrong values .*\({call.replace('_', '-')} of {name}: 3\.0 instead of"
    with pytest.raises(RankFailure, match=wrong):
        run_local(_broken, 2, parallel, call, start_group=True, timeout_s=600)
