"""Tests what stands on results pages, and that they name no machine."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.harness import pages
from experiments.harness.drawing import new_figure
from experiments.harness.evaluation import arguments
from experiments.harness.pages import (
    Against,
    How,
    Picture,
    Table,
    command_of,
    commit,
    commit_of,
    priced_with,
    read_table,
    write_results,
)
from wlb.cost import load_profile
from wlb.cost.machine import program_version

pytestmark = pytest.mark.full

TABLE = Table(
    name="gains",
    title="Gains",
    columns=("policy", "gain", "tokens"),
    rows=[["a|b", 1.23456789, 1000], ["none", None, 20]],
    formats={"gain": ".2f", "tokens": ",d"},
    note="Of nothing.",
)


def test_a_page_has_command_provenance_paper_pictures_and_tables(tmp_path: Path) -> None:
    figure, axes = new_figure(ncols=2)
    axes[1].plot([1, 2])
    results = write_results(
        tmp_path / "fig99",
        title="Figure 99",
        how=How.SIMULATED,
        profile=load_profile("h100"),
        seed=3,
        text="Why.",
        against=[Against(what="gain", paper=1.25, ours=1.23456789)],
        tables=[TABLE],
        figures=[Picture(name="gains_drawn", caption="Gains drawn", figure=figure)],
        command="python -m experiments.fig99",
    )
    page = (results / "README.md").read_text("utf-8")
    assert page.startswith("# Figure 99\n\n`python -m experiments.fig99` at commit ")
    assert ", seed 3." in page
    assert "**Simulated**: times from kernel profile `h100`" in page
    assert "| gain | 1.25 | 1.235 |" in page
    assert "![Gains drawn](gains_drawn.png)" in page
    assert "| a\\|b | 1.23 | 1,000 |\n| none |  | 20 |" in page
    assert "Of nothing. Unrounded: [gains.csv](gains.csv)." in page
    assert (results / "gains.csv").read_text() == (
        "policy,gain,tokens\na|b,1.23457,1000\nnone,,20\n"
    )
    assert (results / "gains_drawn.png").read_bytes().startswith(b"\x89PNG")


def test_blocks_of_a_profile_are_listed_by_what_they_are_worth() -> None:
    worth = priced_with(load_profile("h100"))
    published, assumed = worth.split("**assumed**: ")
    assert "published**: attention (torch_varlen, flash_attention_2), attention (" in published
    assert "GEMM, element-wise, output head, all-gather in a node" in published
    assert "all-gather between nodes" in assumed


def test_absolute_paths_shrink_to_their_names() -> None:
    folder = Path("experiments/paper/fig03")
    given = ["--lengths", "/data/some/x.npy", "--out=/y/z.csv", "runs/a.npy", "--seed", "1"]
    assert command_of(folder, given) == (
        "python -m experiments.paper.fig03 --lengths x.npy --out=z.csv runs/a.npy --seed 1"
    )


def test_long_tables_are_cut_on_the_page_only() -> None:
    rows = [[i] for i in range(100)]
    table = Table(name="t", title="T", columns=("i",), rows=rows, most_rows=2)
    assert table.markdown()[2:] == ["| i |", "|---:|", "| 0 |", "| 1 |", "", *table.markdown()[7:]]
    assert "All 100 rows: [t.csv](t.csv)." in table.markdown()
    hidden = Table(name="t", title="T", columns=("i",), rows=rows, most_rows=0)
    assert hidden.markdown() == ["## T", "", "All 100 rows: [t.csv](t.csv).", ""]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"t: row \[1, 2\] has not 1 values"):
        Table(name="t", title="T", columns=("i",), rows=[[1, 2]])
    with pytest.raises(ValueError, match=r"formats of no column: \['j'\]"):
        Table(name="t", title="T", columns=("i",), rows=[], formats={"j": "d"})
    with pytest.raises(ValueError, match="must be distinct"):
        write_results(
            tmp_path, title="", how=How.COMPUTED, profile="", text="", tables=[TABLE, TABLE]
        )
    assert not list(tmp_path.iterdir())


def test_changed_results_do_not_make_a_commit_dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.harness.pages.program_version", lambda: "abc-dirty")
    monkeypatch.setattr("experiments.harness.pages.source_differences", lambda: "")
    assert commit() == "abc"
    monkeypatch.setattr("experiments.harness.pages.source_differences", lambda: "diff")
    assert commit() == "abc-dirty"
    assert program_version()


def test_every_experiment_stamps_its_page_with_this_commit() -> None:
    modules = [path for path in pages.ROOT.glob("experiments/**/*.py") if path.stem != "pages"]
    assert not [path for path in modules if "program_version" in path.read_text("utf-8")]


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [["a, b", 1.25461, 3], ["none", None, 20], ["zero", 0.0, 0]]
    table = replace(TABLE, rows=rows, formats={"gain": ".3f", "tokens": ",.0f"}, note="")
    given = {"title": "", "how": How.COMPUTED, "profile": "", "text": "", "command": "c"}
    write_results(tmp_path, **given, tables=[table])
    written = (tmp_path / "results" / "gains.csv").read_bytes()
    found = read_table(tmp_path, "gains", title="Gains", formats=table.formats)
    assert found.markdown() == table.markdown()
    assert "| a, b | 1.255 | 3 |" in found.markdown()
    given["text"] = "The table is of commit abc12."
    write_results(tmp_path, **given, tables=[found])
    assert (tmp_path / "results" / "gains.csv").read_bytes() == written
    assert commit_of(tmp_path) == "abc12"


def test_what_is_taken_keeps_its_steps_and_seed(capsys: pytest.CaptureFixture[str]) -> None:
    parser = arguments("A figure.", takes="take the results that are there")
    assert parser.parse_args(["--take"]).take
    assert parser.parse_args(["--seed", "5"]).seed == 5
    with pytest.raises(SystemExit):
        parser.parse_args(["--take", "--seed", "5"])
    assert "leave out --seed" in capsys.readouterr().err
