"""Tests that Table 2 has both policies at the same caps, and takes rows measured before."""

from pathlib import Path

import pytest

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


def test_only_rows_that_are_missing_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = batches_of("evaluation", num_micro_batches=table2.N, num_batches=3, seed=1)
    every = table2.rows()
    monkeypatch.setattr(table2, "rows", lambda: every[:1])
    before = [table2.measured(every[0], batches)]
    solved = [table2.Row(label=table2.solver_label(w), make=every[0].make) for w in (1, 2, 4)]
    figures = {"imbalance": 1.25, "num_steps": 3}
    before += [table2.Result(row=row, figures=figures, note="on a few") for row in solved]
    table2.write_csv(tmp_path / "rows.csv", before)
    known = table2.earlier(tmp_path / "rows.csv")
    monkeypatch.setattr(table2, "rows", lambda: every[:2])
    found = table2.all_rows(batches, num_solved=0, time_limit_s=0, known=known)
    labels = [result.row.label for result in found]
    assert labels == [every[0].label, every[1].label, *(row.label for row in solved)]
    assert found[0].figures == before[0].figures
    assert (found[0].row.paper, found[2].figures, found[2].note) == ((1.44, 0), figures, "on a few")
    assert found[1].figures["num_steps"] == 3
    assert "packing_ms" not in found[1].figures
    assert "| 1 |  | " in table2.markdown("", found[1:2])
    with pytest.raises(ValueError, match="not packed again"):
        found[0].row.make()


def test_the_page_says_which_rows_are_of_an_earlier_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "README.md").write_text(
        "`command` at commit abc123-dirty: 640", "utf-8"
    )
    monkeypatch.setattr(table2, "RESULTS", tmp_path / "results")
    last = table2.rows()[-1]
    known = {row.label: table2.Result(row=row, figures={}) for row in table2.rows()[:-1]}
    assert f"of commit abc123-dirty: all rows but {last.label} (" in table2.taken_text(known)
    assert table2.taken_text({}) == ""
