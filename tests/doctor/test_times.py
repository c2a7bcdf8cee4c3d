"""Tests clocks that differ and ranks that come late."""

from hypothesis import given
from hypothesis import strategies as st

from wlb.doctor.finding import Verdict
from wlb.doctor.times import LATE_S, Exchange, clock_offset, late_finding, skew_finding

delays = st.floats(0, 5)


@given(
    ahead=st.floats(-1e6, 1e6), trips=st.lists(st.tuples(delays, delays), min_size=1, max_size=8)
)
def test_the_clock_is_as_far_ahead_as_is_said_within_the_stated_bound(ahead, trips) -> None:
    exchanges = [
        Exchange(100.0, 100.0 + there + ahead, 100.0 + there + back) for there, back in trips
    ]
    found, about = clock_offset(exchanges)
    assert abs(found - ahead) <= about + 1e-6
    assert about <= min(there + back for there, back in trips) / 2 + 1e-6


def test_a_clock_that_is_apart_is_named() -> None:
    assert skew_finding({}).verdict == Verdict.PASS
    right = {"rank 8 (b)": (0.001, 0.0005), "rank 16 (c)": (-0.02, 0.001)}
    near = skew_finding(right)
    assert near.verdict == Verdict.PASS
    assert (
        near.found
        == "the largest difference is rank 16 (c): -20.00 ms (+-1.00) from rank 0's clock"
    )
    apart = skew_finding({**right, "rank 24 (d)": (2.5, 0.001)})
    assert apart.verdict == Verdict.WARN
    assert apart.found.startswith("rank 24 (d): +2500.00 ms")
    assert skew_finding({"rank 8 (b)": (-3600.0, 0.1)}).verdict == Verdict.FAIL
    # What the way of the question may explain is no fault of the clock.
    assert skew_finding({"rank 8 (b)": (0.5, 0.45)}).verdict == Verdict.PASS


def test_the_rank_that_others_waited_for_is_named() -> None:
    waits = [LATE_S + 3, LATE_S + 2, 0.0, LATE_S + 2.5]
    late = late_finding(waits, ["a", "a", "b", "b"])
    assert late.verdict == Verdict.WARN
    assert late.found == f"later than the median rank: rank 2 (b) by {LATE_S + 2.25:.1f} s"
    assert late_finding([3.0, 2.0, 0.0], ["a", "a", "b"]).verdict == Verdict.PASS
