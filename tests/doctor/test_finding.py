"""Tests rows of the table: which verdict several ranks make, and who is named."""

from hypothesis import given
from hypothesis import strategies as st

from wlb.doctor.finding import Verdict, failed, is_failed, merged, passed, ranges, skipped, warned


def test_the_gravest_verdict_of_all_ranks_names_its_ranks_and_hosts() -> None:
    by_rank = [
        [passed("disk", "free"), passed("NUMA", "near")],
        [failed("disk", "full", "free room"), warned("NUMA", "far", "bind")],
        [failed("disk", "full", "free room"), passed("NUMA", "near")],
    ]
    disk, numa = merged(by_rank, ["a", "b", "c"])
    assert (disk.verdict, disk.ranks, disk.remedy) == (Verdict.FAIL, (1, 2), "free room")
    assert disk.found == "rank 1-2 on b, c: full"
    assert (numa.verdict, numa.found) == (Verdict.WARN, "rank 1 on b: far")
    assert is_failed([numa, disk])
    assert not is_failed([numa])


def test_ranks_that_agree_are_one_row_and_those_that_differ_at_most_three_texts() -> None:
    alike = merged([[passed("a", "x")], [passed("a", "x")]], ["n", "n"])
    assert [(row.found, row.ranks) for row in alike] == [("x", ())]
    (near,) = merged([[passed("a", "1 GiB")], [passed("a", "2 GiB")]], ["n", "n"])
    assert near.found == "1 GiB (on rank 0; similar on others)"
    (many,) = merged([[failed("a", f"{i}", "mend")] for i in range(6)], ["n"] * 6)
    assert many.found == "rank 0 on n: 0; rank 1 on n: 1; rank 2 on n: 2; other texts on rank 3-5"
    # What only some ranks examine, such as rank 0's clocks, is theirs.
    (some,) = merged([[skipped("a", "none")], []], ["n", "m"])
    assert some.found == "none"


@given(st.sets(st.integers(0, 60), min_size=1))
def test_ranges_say_which_ranks(ranks: set[int]) -> None:
    said: set[int] = set()
    for run in ranges(sorted(ranks)).split(", "):
        first, _, last = run.partition("-")
        said |= set(range(int(first), int(last or first) + 1))
    assert said == ranks
