"""Tests the adapters' examples: they train every label once, and ranks are more equal."""

import pytest

for _name, _extra in (("torchtitan", "torchtitan"), ("megatron", "megatron"), ("trl", "hf")):
    pytest.importorskip(_name, reason=f"needs the extra [{_extra}]")

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from experiments.hosts import hugging_face, megatron, torchtitan

from experiments.hosts.common import (
    Document,
    grouped,
    ledger,
    row_of,
    rows_of,
    shifted,
    split_at_restarts,
    stores,
    table_of,
    trained_loss,
    work_ns,
)
from wlb.adapters.dealt import RankBalance
from wlb.plan import IGNORE

pytestmark = pytest.mark.full


def test_the_ledger_sees_what_is_left_out_and_what_comes_twice() -> None:
    a, b = shifted([1, 2, 3]), shifted([4, 5])
    assert a == ([1, 2, 3], [2, 3, IGNORE])
    assert split_at_restarts([1, 2, 3, 4, 5, 0, 0], [2, 3, IGNORE, 5, *[IGNORE] * 3],
                             [0, 1, 2, 0, 1, 0, 1]) == [a, b]  # fmt: skip
    rank: list[list[Document]] = [[a], [b]]
    step = [[[[a], [a]], [[b], []]]]
    row = row_of("library", "how", step, ledger([a, b, shifted([7, 8])]), [1.0, 3.0])
    assert (row.num_labels, row.num_left_out, row.num_twice) == (5, 1, 2)
    assert row.loss == 2.0
    assert row.imbalance > 1
    assert "| library | how | 1 |" in "\n".join(table_of([row]).markdown())
    assert grouped([rank, rank]) == [[rank, rank]]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("example", [torchtitan, megatron])
def test_an_example(example: object) -> None:
    theirs, *ours = example.compare(seeds=0)  # type: ignore[attr-defined]
    for row in ours:
        assert row.num_left_out == row.num_twice == 0
        assert row.imbalance < theirs.imbalance
        assert row.utilisation > theirs.utilisation


def test_what_libraries_deal_is_learnt_from() -> None:
    """Two documents come over and over; in one step a rank has no document."""
    a, b = shifted([5, 6, 7, 8, 9, 10, 11]), shifted([20, 21, 22])
    step = [[[a, b]], [[]]]
    before, after = (trained_loss([step] * n, [a[0], b[0]]) for n in (1, 40))
    assert after < 0.7 * before


@pytest.mark.nightly
@pytest.mark.dist
def test_the_trainer_on_two_processes() -> None:
    ranks, loss = hugging_face.run("balanced", 0)
    steps = grouped(ranks)
    rows = rows_of(stores().train)
    assert ledger(d for rank in ranks for mb in rank for d in mb) == ledger(map(shifted, rows))
    assert RankBalance.of(work_ns(steps)).imbalance < 1.06
    assert loss < 4.5
