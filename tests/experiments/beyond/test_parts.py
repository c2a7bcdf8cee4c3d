"""Tests that rows of `beyond` are named for what they have, and that its page is written again."""

from pathlib import Path

import pytest

from experiments.beyond.parts import __main__ as beyond
from experiments.harness.pages import How, commit_of, write_results

pytestmark = pytest.mark.full

PARTS = {
    "balanced": "sharding.strategy=balanced",
    "zero-bubble": beyond.ZERO_BUBBLE,
    "late weights": beyond.LATE,
    "all chunks": beyond.chunks("7b_128k"),
    "bounded": "packing.policy=bounded",
}


def test_a_row_has_what_its_name_says_and_a_plus_adds_to_the_row_above() -> None:
    made = beyond.variants("7b_128k")
    above: set[str] = set()
    for name, overrides in made.items():
        said = {part for part in PARTS if part in name}
        has = {part for part, override in PARTS.items() if override in overrides}
        assert has == (said | above if name.startswith("+") else said)
        above = has
    for name in made:
        cases = beyond.group(name, "7b_128k", made[name])
        by_need = any("sharding.exchange" in o for case in cases for o in case.overrides)
        assert by_need == (name == beyond.NEED)


def test_a_page_is_written_again_from_earlier_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    table = beyond.earlier_parts()
    assert [row[0] for row in table.rows] == list(beyond.variants("7b_128k"))
    said = beyond.text_of(table)
    folder = tmp_path / "experiments" / "beyond" / "parts"
    common = {"title": "Old", "how": How.SIMULATED, "profile": "", "text": said}
    write_results(folder, **common, tables=[table])
    first = commit_of(folder)
    csv = (folder / "results" / "parts.csv").read_text("utf-8")
    monkeypatch.setattr(beyond, "FOLDER", folder)
    for _ in range(2):
        monkeypatch.setattr("experiments.harness.pages.commit", lambda: "later")
        beyond.main(["--take"])
        page = (folder / "results" / "README.md").read_text("utf-8")
        assert f"is of commit {first}." in page
    assert said in page
    assert csv == (folder / "results" / "parts.csv").read_text("utf-8")
    (folder / "results" / "README.md").write_text("no page", "utf-8")
    with pytest.raises(ValueError, match="names no commit"):
        commit_of(folder)
