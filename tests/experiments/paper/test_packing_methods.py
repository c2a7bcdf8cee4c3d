"""Tests counts of packing methods: by hand, against plain references, beside the paper's tables."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.paper.packing_methods import __main__ as page
from experiments.paper.packing_methods.counting import (
    OURS,
    Count,
    Method,
    count,
    first_come,
    fixed_length,
    length_grouped,
    mini_batch,
    multipack,
    num_rows,
    padded,
)
from experiments.paper.packing_methods.lengths import DATASETS, FLAN, MSL, ORCA_MATH, STACK, Dataset
from experiments.paper.packing_methods.paper import StepsRow, rows_rows, steps_rows
from experiments.paper.packing_methods.rows import RowCounts, by_thousands, row_counts
from experiments.paper.packing_methods.steps import StepCounts, step_counts

pytestmark = pytest.mark.full

ROW = 16
EXAMPLES = st.lists(st.integers(1, ROW), min_size=1, max_size=60).map(np.array)
SHUFFLED = (
    Method.RANDOM_PADDING,
    Method.GROUPED_PADDING,
    Method.MINI_BATCH,
    Method.FIXED_LENGTH,
    Method.MULTIPACK,
    Method.MULTIPACK_GROUPS,
    Method.RANDOM,
    Method.SORTED,
    Method.FIRST_FIT_DECREASING,
    Method.BEST_FIT_DECREASING,
)


@pytest.fixture(scope="module")
def steps() -> list[StepCounts]:
    """Counts Tables 4 to 6; ours, which take most of the time, stand beside Multipack at msl
    8,192.
    """

    def is_quick(row: StepsRow) -> bool:
        return row.method != Method.MULTIPACK or (row.msl == 8192 and row.gas == 32)

    return step_counts(range(1), printed=filter(is_quick, steps_rows()))


@pytest.fixture(scope="module")
def rows() -> list[RowCounts]:
    return row_counts(range(1))


def next_fit(lengths: list[int], row: int) -> int:
    rows, filled = 0, row
    for length in lengths:
        filled += length
        if filled > row:
            rows, filled = rows + 1, length
    return rows


def first_fit_decreasing(lengths: list[int], row: int) -> int:
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = next((i for i, room in enumerate(rooms) if room >= length), len(rooms))
        rooms += [row] * (at == len(rooms))
        rooms[at] -= length
    return len(rooms)


@pytest.mark.parametrize("dataset", DATASETS.values(), ids=DATASETS)
def test_lengths_have_the_paper_s_number_and_total(dataset: Dataset) -> None:
    lengths = dataset.lengths()
    assert lengths.size == dataset.num_examples
    assert lengths.sum() == pytest.approx(dataset.tokens, rel=1e-5)
    assert 1 <= lengths.min() <= lengths.max() <= MSL
    assert np.array_equal(np.sort(dataset.shuffled(3)), lengths)
    printed = [row for row in steps_rows() if row.dataset == dataset.title]
    assert all(row.tokens == pytest.approx(dataset.tokens, rel=0.003) for row in printed)


def test_long_examples_are_cut_or_left_out_and_counted() -> None:
    assert (FLAN.left_out() > MSL).all()
    assert FLAN.left_out().size == 39
    assert not ORCA_MATH.left_out().size
    stack = STACK.lengths()
    assert np.array_equal(np.minimum(STACK.uncut(), MSL), stack)
    assert int((stack == MSL).sum()) > 2000
    # The logarithms of a lognormal that nothing is cut from are spread by sigma.
    free = Dataset(title="free", num_examples=5000, tokens=4_000_000, sigma=1.2, longest=None)
    assert np.log(free.lengths()).std() == pytest.approx(1.2, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 10}, "19961 examples of 10 tokens"),
        ({"tokens": 19_961 * MSL}, "81760256 tokens are more than 19961 examples"),
        ({"sigma": 0.0}, "sigma = 0.0; it must be above 0"),
        ({"longest": None}, "nothing is cut or left out without a longest example"),
    ],
)
def test_a_data_set_that_cannot_be_is_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(FLAN, **changes)


def test_methods_by_hand() -> None:
    lengths = np.array([3, 1, 2])
    assert padded(lengths, bs=2, msl=5) == Count(
        rows=3, micro_batches=2, tokens=6, positions=2 * 3 + 1 * 2, room=15
    )
    assert padded(lengths, bs=2, msl=5).padding == 0.25
    assert mini_batch(lengths, bs=2, msl=5).padding == 0
    # 0-2 | 3-4, 5-6 | 7-9, 10-11: two examples go on in the next row.
    assert fixed_length(np.array([3, 4, 5]), bs=2, msl=5) == Count(
        rows=3, micro_batches=2, tokens=12, positions=15, room=15, num_broken=2
    )
    assert first_come(np.array([3, 3, 2, 5]), bs=1, msl=5).rows == 3  # [3], [3, 2], [5]
    assert first_come(np.array([5, 3, 3, 2]), bs=1, msl=5).utilisation == 13 / 15
    assert Count(rows=9, micro_batches=9, tokens=1, positions=1, room=1).steps(4) == 2
    assert Count(rows=3, micro_batches=3, tokens=1, positions=1, room=1).steps(4) == 1


def test_multipack_takes_what_fits_a_row_for_each_gpu() -> None:
    whole = multipack(np.array([4, 3, 2, 1]), bs=1, msl=5, num_gpus=2)  # [4, 1], [3, 2]
    assert (whole.rows, whole.tokens, whole.left_out, whole.utilisation) == (2, 10, 0, 1.0)
    more = multipack(np.array([4, 3, 2, 1, 5]), bs=1, msl=5, num_gpus=2)
    assert (more.rows, more.tokens, more.left_out) == (2, 10, 5)  # no second row for the 5


def test_grouped_order_is_sorted_within_megabatches() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 1000)
    order = length_grouped(lengths, batch=2, rng=np.random.default_rng(1))
    assert sorted(order.tolist()) == list(range(1000))
    assert lengths[order[0]] == lengths.max()
    falls = np.diff(lengths[order]) > 0
    # Ten megabatches of 50 x 2; the exchange with the longest can add two rises.
    assert set(np.flatnonzero(falls)) >= {i * 100 - 1 for i in range(2, 10)}
    assert falls.sum() <= 11
    few = length_grouped(lengths[:16], batch=2, rng=np.random.default_rng(1))  # 2 x 2 at a time
    assert np.flatnonzero(np.diff(lengths[few]) > 0).size >= 3
    assert sorted(few.tolist()) == list(range(16))


@given(EXAMPLES, st.integers(1, 5), st.integers(0, 3))
def test_every_token_is_in_a_row_or_counted(lengths: np.ndarray, bs: int, seed: int) -> None:
    for method in SHUFFLED:
        made = count(method, lengths, bs=bs, msl=ROW, gas=2, seed=seed)
        assert made.tokens + made.left_out == lengths.sum()
        assert made.tokens <= made.positions <= made.room
        assert made.room == made.rows * ROW
        assert made.micro_batches == -(-made.rows // bs)
        if method != Method.MULTIPACK_GROUPS:
            assert made.left_out == 0


@given(EXAMPLES)
def test_rows_are_those_of_plain_packers(lengths: np.ndarray) -> None:
    expected = next_fit(lengths.tolist(), ROW)
    assert first_come(lengths, bs=1, msl=ROW).rows == expected
    assert multipack(lengths, bs=1, msl=ROW).rows == expected
    assert multipack(lengths, bs=1, msl=ROW).left_out == 0
    decreasing = first_fit_decreasing(lengths.tolist(), ROW)
    assert num_rows(lengths, ROW) == decreasing
    method = Method.FIRST_FIT_DECREASING
    assert count(method, lengths, bs=1, msl=ROW, gas=1, seed=0).rows == decreasing


def test_examples_that_no_row_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="example 1 has 20 tokens, more than a row of 16"):
        count(Method.RANDOM, np.array([3, 20]), bs=1, msl=16, gas=1, seed=0)
    with pytest.raises(ValueError, match="no examples"):
        count(Method.RANDOM, np.array([], np.int64), bs=1, msl=16, gas=1, seed=0)


def test_the_paper_s_tables_are_whole() -> None:
    assert len(steps_rows()) == 3 * 34
    assert len(rows_rows()) == 2 * 10 * 4
    assert {row.method for row in steps_rows()} == {*Method} - {*OURS}
    # Examples over (bs x gas), rounded down: the tables are of one GPU.
    padding = [row for row in steps_rows() if row.method == Method.RANDOM_PADDING]
    given = {"FLAN": 19_961, "OrcaMath": 20_000, "Stack": 20_000}
    assert [row.steps for row in padding] == [
        given[row.dataset] // (row.bs * row.gas) for row in padding
    ]


def test_steps_are_within_a_percent_of_the_paper_s(steps: list[StepCounts]) -> None:
    compared = [s for s in steps if s.difference is not None]
    assert len(compared) == 102 - 9
    assert max(abs(s.difference or 0) for s in compared) <= 0.0105
    assert sum(s.difference == 0 for s in compared) >= 75


def test_multipack_on_one_gpu_has_the_paper_s_steps() -> None:
    for row in steps_rows():
        if row.method == Method.MULTIPACK:
            lengths = DATASETS[row.dataset].lengths()
            made = count(Method.MULTIPACK, lengths, bs=1, msl=row.msl, gas=row.gas, seed=0)
            assert made.steps(row.gas) == pytest.approx(row.steps, rel=0.011)
            assert made.left_out == 0


@pytest.mark.parametrize(
    ("name", "gas", "fewest"), [("FLAN", 4, 281), ("OrcaMath", 4, 241), ("Stack", 12, 274)]
)
def test_best_fit_needs_no_more_steps_than_cutting(name: str, gas: int, fewest: int) -> None:
    lengths = DATASETS[name].lengths()
    made = count(Method.BEST_FIT_DECREASING, lengths, bs=1, msl=8192, gas=gas, seed=0)
    assert made.steps(gas) == fewest
    assert made.rows == -(-int(lengths.sum()) // 8192)
    assert made.num_broken == 0


def test_padding_is_far_less_in_groups_of_like_length(steps: list[StepCounts]) -> None:
    by = {(s.dataset, s.bs, s.method): s.mean("padding") for s in steps if s.msl == MSL}
    for name in DATASETS:
        for bs in (2, 4):
            assert by[name, bs, Method.GROUPED_PADDING] < 0.01
            assert 0.2 < by[name, bs, Method.RANDOM_PADDING] < 0.6


def test_unfinished_rows_of_each_thousand_are_dropped() -> None:
    ten = np.full(2000, 10)
    assert by_thousands(ten, 4096, fixed_length) == (4, 2 * (10_000 - 8192))
    assert by_thousands(ten, 1000, fixed_length) == (20, 0)  # all rows are full
    assert by_thousands(ten, 4096, first_come) == (4, 2 * (10_000 - 2 * 4090))
    assert by_thousands(np.full(1000, 4096), 4096, first_come) == (1000, 0)


@pytest.mark.parametrize(("layout", "most"), [("basic packing", 0.004), ("flat", 0.03)])
def test_rows_come_out_as_printed(rows: list[RowCounts], layout: str, most: float) -> None:
    found = [f for f in rows if f.paper.layout == layout]
    assert len(found) == 20
    assert max(abs(f.difference(as_printed=True)) for f in found) < most
    lossless = [abs(f.difference(as_printed=False)) for f in found]
    assert np.mean(lossless) > np.mean([abs(f.difference(as_printed=True)) for f in found])
    assert all((f.lost or 0) > 0 for f in found)


def test_the_page_draws_and_says_what_it_found(
    steps: list[StepCounts], rows: list[RowCounts]
) -> None:
    table = page.steps_table([s for s in steps if s.dataset == "FLAN"], number=4)
    assert table.rows[0][:4] == ["RandomSampling+Padding", "2, 4096, 32", 311, 311]
    assert len(page.rows_table(rows).rows) == 80
    assert [row[0] for row in page.datasets_table().rows] == list(DATASETS)
    assert page.padding_table(steps).rows[0][:3] == ["FLAN", 2, table.rows[0][0]]
    assert page.draw_lengths()
    assert page.draw_steps(steps, gas=page.SMALL_GAS)
    assert page.draw_rows(rows)


def test_a_quick_run_prints_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    rows: list[RowCounts],
) -> None:
    few = {("FLAN", 8192, 4), ("OrcaMath", 8192, 4), ("Stack", 8192, 12)}

    def counted(seeds: range) -> list[StepCounts]:
        printed = [r for r in steps_rows() if (r.dataset, r.msl, r.gas) in few or r.msl == MSL]
        return step_counts(seeds, printed=[r for r in printed if r.method != Method.MULTIPACK])

    monkeypatch.setattr("sys.argv", ["packing_methods", "--quick"])
    monkeypatch.setattr(page, "step_counts", counted)
    monkeypatch.setattr(page, "row_counts", lambda seeds: rows)
    monkeypatch.setattr(page, "write_results", lambda *_, **__: pytest.fail("wrote results"))
    page.main()
    out = capsys.readouterr().out
    for word in ("Table 4: steps", "Table 6: steps", "Tables 2 and 3: rows", "GroupByLength"):
        assert word in out
