"""Tests what rows say of communicators: wrong numbers, slow groups, the profile's bandwidth."""

from typing import Any

import pytest

from tests.doctor.patient import facts, gpu
from wlb.cost import Collective, load_profile
from wlb.doctor.finding import Verdict
from wlb.doctor.network import GroupTiming, expected_bytes_per_s, link_findings

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
    assert row.found.startswith("2 of 2 ranks, all_gather: ")
    assert f"profile h100 {expected / 1e9:.2f} GB/s" in row.found
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
    assert (tp.verdict, tp.found) == (Verdict.FAIL, "WRONG numbers in ranks 2-3 on n1")
    assert cp.check == "communicator cp"


def test_one_rank_has_no_communicators() -> None:
    (row,) = link_findings([], GPUS, H100)
    assert row.verdict == Verdict.SKIP
