"""Tests what rows say of communicators: wrong numbers, slow groups, the profile's bandwidth."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.doctor.patient import facts, gpu, patient
from wlb.cost import Collective, load_profile
from wlb.doctor.finding import Verdict
from wlb.doctor.network import GroupTiming, expected_bytes_per_s, link_findings, measure_groups
from wlb.launch.local import run_local
from wlb.parallel.mesh import build_mesh
from wlb.parallel.world import World
from wlb.spec import load

GPUS = [facts(rank, gpu=gpu(rank)) for rank in range(4)]
H100 = load_profile("h100")


def timing(*ranks: int, seconds: float = 1e-3, axis: str = "tp", **changed: Any) -> GroupTiming:
    told: dict[str, Any] = {
        "axis": axis,
        "ranks": ranks,
        "op": Collective.ALL_GATHER,
        "size_bytes": 1 << 28,
        "first_s": 0.5,
        "latency_s": 2e-5,
        "seconds": seconds,
        "is_right": True,
    }
    return GroupTiming(**{**told, **changed})


def test_bandwidth_counts_what_a_rank_puts_on_the_wire() -> None:
    assert timing(0, 1, 2, 3).bytes_per_s == pytest.approx(0.75 * (1 << 28) / 1e-3)
    reduced = timing(0, 1, 2, 3, op=Collective.ALL_REDUCE)
    assert reduced.bytes_per_s == pytest.approx(1.5 * (1 << 28) / 1e-3)


def test_the_profile_s_price_is_what_is_expected() -> None:
    one = timing(0, 1)
    cost = H100.collective(one.op, span_ranks=2)
    took_s = cost.time_ns(one.size_bytes, num_ranks=2) / 1e9
    assert expected_bytes_per_s(one, H100) == pytest.approx(one.size_bytes / 2 / took_s)
    # Ranks 0 and 8 are on two nodes of eight.
    between = expected_bytes_per_s(timing(0, 8), H100)
    assert between < expected_bytes_per_s(one, H100)


def test_the_slowest_group_is_named_where_it_is_far_below_the_profile() -> None:
    expected = expected_bytes_per_s(timing(0, 1), H100)
    usual_s = (1 << 27) / expected
    well = [timing(*r, seconds=usual_s * 1.2) for r in [(0, 1), (0, 1), (2, 3), (2, 3)]]
    (row,) = link_findings(well, GPUS, H100)
    assert (row.check, row.verdict) == ("communicator tp", Verdict.PASS)
    assert row.found.startswith("2 groups of 2 ranks, all_gather: ")
    assert f"profile h100 assumes {expected / 1e9:.2f} GB/s" in row.found
    slow = timing(2, 3, seconds=usual_s * 3)
    (row,) = link_findings([*well, slow], GPUS, H100)
    assert row.verdict == Verdict.WARN
    assert row.found.endswith("slowest: ranks 2-3 on n1")
    (on_cpu,) = link_findings([slow], [facts(rank) for rank in range(4)], H100)
    assert on_cpu.verdict == Verdict.PASS
    (alone,) = link_findings([slow], GPUS, None)
    assert (alone.verdict, "profile" in alone.found) == (Verdict.PASS, False)


def test_wrong_numbers_fail_and_name_the_hosts() -> None:
    found = [timing(0, 1), timing(2, 3, is_right=False), timing(0, 2, axis="cp")]
    tp, cp = link_findings(found, GPUS, H100)
    assert (tp.verdict, tp.found) == (Verdict.FAIL, "WRONG results from ranks 2-3 on n1")
    assert cp.check == "communicator cp"


def test_one_rank_has_no_communicators() -> None:
    (row,) = link_findings([], GPUS, H100)
    assert row.verdict == Verdict.SKIP


def test_rows_between_nodes_are_held_against_a_rank_s_own_link() -> None:
    """In a node they have an all-gather's bandwidth."""
    link = H100.collective(Collective.P2P, span_ranks=9).bytes_per_s
    assert expected_bytes_per_s(timing(0, 8, axis="cp rows"), H100) == link
    near = timing(0, 1, axis="cp rows")
    assert expected_bytes_per_s(near, H100) == expected_bytes_per_s(timing(0, 1), H100)
    (row,) = link_findings([near], GPUS, H100)
    assert row.check == "communicator cp rows"
    assert row.found.startswith("1 group of 2 ranks, all_to_all: ")


def measured_on_a_rank(world: World) -> dict[str, tuple[bool, float]]:
    keys = ["parallel.cp=2", "parallel.dp=1", "sharding.exchange=auto", "cp.overlap_stages=1"]
    spec = load("demo_single", keys)
    mesh = build_mesh(spec.parallel, torch.device("cpu"))
    found = measure_groups(replace(patient(), spec=spec, mesh=mesh))
    return {t.axis: (t.is_right, t.seconds) for t in found}


@pytest.mark.full
@pytest.mark.dist
def test_the_exchange_of_rows_is_measured() -> None:
    for found in run_local(measured_on_a_rank, 2, start_group=True, timeout_s=600):
        # With CP ranks alone CP's communicator is the world's.
        assert set(found) == {"world", "cp rows"}
        assert all(is_right and seconds > 0 for is_right, seconds in found.values())
