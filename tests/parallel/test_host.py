"""Tests communication between hosts: trees, sockets that are opened, and limits on open files."""

import contextlib
import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from wlb.launch.local import run_local
from wlb.parallel import host
from wlb.parallel import world as worlds
from wlb.plan import UserError


def _trees(world: worlds.World) -> tuple[list[float], int, list[list[int]] | None]:
    sums, most = torch.tensor([world.rank, 0.5]), torch.tensor(7 * world.rank)
    host.all_reduce_hosts(sums)
    host.all_reduce_hosts(most, "max")
    rows = host.gather_rows(torch.tensor([world.rank, -world.rank]))
    return sums.tolist(), int(most), None if rows is None else rows.tolist()


@pytest.mark.dist
@pytest.mark.parametrize("num", [5, pytest.param(1, marks=pytest.mark.full)])
def test_sums_and_rows_of_any_number_of_ranks(num: int) -> None:
    results = run_local(_trees, num, start_group=True, timeout_s=600)
    for sums, most, _ in results:
        assert (sums, most) == ([num * (num - 1) / 2, num / 2], 7 * (num - 1))
    assert results[0][2] == [[rank, -rank] for rank in range(num)]
    assert [rows for *_, rows in results[1:]] == [None] * (num - 1)


def _num_sockets() -> int:
    num = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            num += os.readlink(link).startswith("socket:")
    return num


def _sockets(world: worlds.World) -> list[int]:
    """Returns sockets that the world's group has opened: before it is used, then after each use."""
    before = _num_sockets()
    group = dist.new_group(backend="gloo")  # as the checkpoints' group
    counts = [_num_sockets() - before]
    for use in (
        lambda: dist.all_gather_object([None] * world.world_size, "text", group=group),
        lambda: dist.broadcast_object_list([1], src=0, group=group),
        lambda: dist.barrier(group),
    ):
        use()
        counts.append(_num_sockets() - before)
    return counts


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="sockets are counted in /proc")
def test_a_group_opens_sockets_only_as_it_is_used() -> None:
    num, peers = 16, 7  # peers: 1, 2, 4 and 8 ranks before and after
    results = run_local(_sockets, num, start_group=True, timeout_s=600)
    assert min(counts[-1] for counts in results) <= peers + 1
    for counts in results:
        assert counts[0] < num - 1, "a full mesh was made"
        # Where both sides connect at the same time, there are two sockets for a moment.
        assert counts[-1] <= 2 * peers + 1 < num


def test_the_cost_of_8192_ranks_fits_the_usual_limits() -> None:
    cost = host.host_cost(8192)
    assert (
        cost.sockets == 103
    )  # two groups of 25 peers (two sockets for a moment) and a listener, ...
    assert cost.messages == 26
    assert cost.store_requests < 2_000_000
    assert cost.store_bytes < 100e6
    # Rank 0 serves the store, and torch gathers checkpoints' plans there.
    assert 3 * 8192 < cost.root_sockets < 25_000
    # What a full mesh would take, of which there were two.
    assert cost.full_mesh_sockets == 8192
    assert cost.full_mesh_bytes > 4e12


def test_few_ranks_cost_what_was_measured() -> None:
    """A Gloo group of 32 ranks has 9 peers a rank and a listener, one of 64 has 11."""
    assert host.host_cost(32).sockets == 2 * (2 * 9 + 1) + 1
    assert host.host_cost(64).sockets == 2 * (2 * 11 + 1) + 1
    assert host.host_cost(1).root_sockets < 10


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Holds this process's limits on open files, oldest first; starts with the usual ones."""
    known = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: known[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: known.append(new))
    return known


def test_the_soft_limit_is_raised_where_it_may_not_suffice(limits: list[tuple[int, int]]) -> None:
    host.allow_open_files(1, 8192, "cuda")
    host.allow_open_files(0, 64, "cuda")
    assert limits == [(1024, 4096)]
    host.allow_open_files(0, 512, "cuda")
    assert limits == [(1024, 4096), (4096, 4096)]
    limits.append((1024, resource.RLIM_INFINITY))
    host.allow_open_files(0, 8192, "cuda")
    soft, hard = limits[-1]
    assert soft == host.host_cost(8192).root_sockets + 512
    assert hard == resource.RLIM_INFINITY


def test_a_hard_limit_that_is_too_low_is_refused(limits: list[tuple[int, int]]) -> None:
    with pytest.raises(UserError, match=r"rank 0 of 8192 .* may open only 4096 .*LimitNOFILE"):
        host.allow_open_files(0, 8192, "cuda")
    assert limits == [(1024, 4096)]
