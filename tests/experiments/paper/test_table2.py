"""Tests that Table 2 has both policies at the same caps, and takes rows measured before."""

from pathlib import Path

import pytest

from experiments.harness.pages import How, write_results
from experiments.harness.streams import batches_of
from experiments.paper.table2 import __main__ as table2
from wlb.packing import BoundedPacker, VarLenPacker

pytestmark = pytest.mark.full


def test_both_policies_have_rows_with_the_same_caps() -> None:
    made = {row.label: row.make() for row in table2.rows()}
    for labels in table2.CAPPED.values():
        theirs, ours = (made[label] for label in labels)
        assert isinstance(theirs, VarLenPacker)
        assert isinstance(ours, BoundedPacker)
        assert (theirs.s_max, theirs.step_tokens) == (ours.s_max, ours.step_tokens)


def test_every_method_stands_at_the_prices_of_the_faster_kernel_too() -> None:
    batches = batches_of("evaluation", num_micro_batches=table2.N, num_batches=3, seed=1)
    table = table2.flash_3_table(batches)
    assert [row[0] for row in table.rows] == [row.label for row in table2.rows()]
    plain, ours = table.rows[0], table.rows[-1]
    older = table2.measured(table2.rows()[0], batches)
    assert older["imbalance"] > plain[2] > 1  # attention takes more of a step with the older one
    assert ours[2] < plain[2]


def test_only_rows_that_are_missing_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = batches_of("evaluation", num_micro_batches=table2.N, num_batches=3, seed=1)
    every = table2.rows()
    monkeypatch.setattr(table2, "rows", lambda: every[:1])
    before = [table2.measured(every[0], batches)]
    figures = {"imbalance": 1.25, "num_steps": 3}
    for w in (1, 2, 4):
        row = table2.Row(label=table2.solver_label(w), make=every[0].make)
        before.append(table2.record_of(row, figures, "on a few"))
    table = table2.table_of("evaluation", before)
    write_results(
        tmp_path, title="", how=How.PREDICTED, profile="", text="", tables=[table], command="c"
    )
    known = table2.earlier(tmp_path, "evaluation")
    monkeypatch.setattr(table2, "rows", lambda: every[:2])
    found = table2.all_rows(batches, num_solved=0, time_limit_s=0, known=known)
    solvers = [record["row"] for record in before[1:]]
    assert [record["row"] for record in found] == [every[0].label, every[1].label, *solvers]
    words = {key for key, value in before[0].items() if not isinstance(value, float)}
    for key, value in before[0].items():
        assert found[0][key] == (value if key in words else pytest.approx(value, rel=1e-5)), key
    assert (found[0]["paper_imbalance"], found[0]["paper_ms"]) == (1.44, 0)
    assert (found[2]["imbalance"], found[2]["note"]) == (1.25, "on a few")
    assert found[1]["num_steps"] == 3
    assert found[1]["packing_ms"] is None
    page = table2.table_of("evaluation", found).markdown()
    assert page[2].startswith("| method | paper | ours |")
    assert page[5].endswith(" |  |  |")


def test_the_page_says_which_rows_are_of_an_earlier_commit(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "README.md").write_text(
        "`command` at commit abc123-dirty: 640", "utf-8"
    )
    last = table2.rows()[-1]
    known = {row.label: table2.record_of(row, {}) for row in table2.rows()[:-1]}
    said = table2.taken_text(tmp_path, known)
    assert f"of commit abc123-dirty: all rows but {last.label} (" in said
    assert table2.taken_text(tmp_path, {}) == ""


def test_committed_rows_can_be_taken() -> None:
    """Every method has a row in the committed results, with its numbers."""
    known = table2.earlier(Path(table2.__file__).parent, "evaluation")
    labels = [row.label for row in table2.rows()]
    assert set(labels) <= set(known)
    assert known["WLB-LLM, 2 queues"]["imbalance"] == pytest.approx(1.0525, abs=1e-4)
    assert known["WLB-LLM, 2 queues"]["num_steps"] == 640
