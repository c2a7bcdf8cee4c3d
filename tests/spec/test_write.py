"""Tests specs as TOML: what is written reads back as the same spec."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from wlb.spec import RunSpec, load, presets, to_toml


@pytest.mark.parametrize("name", presets())
def test_every_preset_reads_back(name: str, tmp_path: Path) -> None:
    spec = load(name)
    path = tmp_path / "again.toml"
    path.write_text(to_toml(spec), "utf-8")
    assert load(str(path)) == spec


def test_any_text_and_nested_sections_read_back(tmp_path: Path) -> None:
    spec = load("demo", ["model.rope_scaling.factor=8.0", "training.beta2=1e-12"])
    odd = 'a "b" \\ c\t\x7f é \U0001f600\n'
    spec = replace(spec, data=replace(spec.data, corpus=odd))
    text = to_toml(spec, comments=["one\nline", "another"])
    assert text.startswith("# one line\n# another\n\n[run]\n")
    path = tmp_path / "again.toml"
    path.write_text(text, "utf-8")
    assert load(str(path)) == spec
    assert tomllib.loads(text)["model"]["rope_scaling"] == {"factor": 8.0}


def test_sections_that_a_search_chooses_are_written_whole() -> None:
    values = tomllib.loads(to_toml(RunSpec()))
    assert sorted(values) == ["packing", "parallel", "pp", "sharding"]
    assert values["parallel"] == {"tp": 1, "cp": 1, "pp": 1, "dp": 0, "ep": 1}
    assert values["packing"]["queue_thresholds"] == [0.2, 0.63]
    assert values["packing"]["price_range"] == [1.0, 1.0]
