"""Tests presets, TOML files and `--set`."""

import json
import tomllib
from pathlib import Path

import pytest

from wlb.plan import UserError
from wlb.spec import RunSpec, Schedule, apply, load, presets, to_dict

SMALL = """
[model]
num_layers = 4
[pp]
virtual_stages = 1
"""


def write(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text, "utf-8")
    return str(path)


def test_the_demo_preset_is_there() -> None:
    assert "demo" in presets()
    spec = load("demo")
    parallel = spec.parallel
    assert (parallel.tp, parallel.cp, parallel.pp, parallel.world_size) == (2, 2, 2, 8)
    assert spec.pp.schedule is Schedule.INTERLEAVED_1F1B


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads_and_round_trips(name: str) -> None:
    spec = load(name)
    values = to_dict(spec)
    assert apply(RunSpec(), json.loads(json.dumps(values)), source="again") == spec
    assert spec.to_dict() == values
    assert spec.run.name == name


def test_a_file_sets_what_it_says_and_nothing_else(tmp_path: Path) -> None:
    spec = load(write(tmp_path, SMALL))
    said = tomllib.loads(SMALL)
    assert spec == apply(RunSpec(), said, source="x")
    assert (spec.model.num_layers, spec.pp.virtual_stages) == (4, 1)
    assert spec.training == RunSpec().training


def test_set_overrides_the_file_and_the_last_one_wins(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    spec = load(path, ["model.num_layers=6", "training.steps = 5", "model.num_layers=8"])
    assert (spec.model.num_layers, spec.training.steps) == (8, 5)


@pytest.mark.parametrize(
    ("text", "section", "name", "value"),
    [
        ("packing.policy=original", "packing", "policy", "original"),  # a bare name
        ('packing.policy="original"', "packing", "policy", "original"),
        ("run.name=long-run.2", "run", "name", "long-run.2"),
        ('run.name="7"', "run", "name", "7"),
        ("data.store=/data/a=b", "data", "store", "/data/a=b"),  # only the first = divides
        ("data.store=", "data", "store", ""),
        ("packing.queue_thresholds=[0.25, 1]", "packing", "queue_thresholds", (0.25, 1.0)),
        ("packing.queue_thresholds=[]", "packing", "queue_thresholds", ()),
        ("planner.baseline=false", "planner", "baseline", False),
        ("training.min_learning_rate=1e-4", "training", "min_learning_rate", 1e-4),
        ("training.learning_rate=1", "training", "learning_rate", 1.0),
        ("training.steps=1_000", "training", "steps", 1000),
    ],
)
def test_override_values(text: str, section: str, name: str, value: object) -> None:
    got = getattr(getattr(load("demo", [text]), section), name)
    assert got == value
    assert isinstance(got, type(value))


def test_override_of_a_nested_section() -> None:
    assert load("demo", ["model.rope_scaling.factor=8"]).model.rope_scaling.factor == 8.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training.steps", "--set 'training.steps': write section.key=value"),
        ("training.stepz=1", "--set training.stepz=1: unknown key 'training.stepz'; did you mean"),
        ("training.steps=many", "--set training.steps=many: training.steps must be int, got 'many"),
        ("training.steps=true", "training.steps must be int, got True"),
        ("training.steps=1.5", "training.steps must be int, got 1.5"),
        ("training.steps=0", "training.steps = 0 must be at least 1"),
        ("training=3", "training is a section, so it cannot be set to 3"),
        ("=3", "--set =3: unknown key ''; use one of run, model, parallel"),
    ],
)
def test_overrides_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        load("demo", [text])
    assert message in str(refused.value)


def test_a_missing_file_lists_the_presets() -> None:
    with pytest.raises(ValueError, match=r"'dmeo' is neither a preset \(.*demo.*\) nor a TOML"):
        load("dmeo")


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is neither a preset"):
        load(str(tmp_path))


def test_what_is_not_toml_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "[model\nhidden_size = 3")
    with pytest.raises(ValueError, match=r"mine\.toml: not valid TOML: .*line 1"):
        load(path)
    Path(path).write_bytes(b'[run]\nname = "caf\xe9"\n')
    with pytest.raises(ValueError, match=r"mine\.toml: not valid TOML: .*utf-8"):
        load(path)


def test_a_file_with_a_bad_key_names_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[model]\nhiden_size = 64")
    with pytest.raises(ValueError, match=r"mine\.toml: unknown key 'model\.hiden_size'; did you"):
        load(path)


def test_what_is_loaded_is_checked(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL + "[parallel]\ntp = 16")
    with pytest.raises(
        ValueError, match=r"model\.num_heads = 8 is not a multiple of parallel\.tp = 16"
    ):
        load(path)


def test_tokens_and_counts_that_follow_from_what_is_set(tmp_path: Path) -> None:
    path = write(tmp_path, "[parallel]\npp = 4\ndp = 3\ntp = 4\n[pp]\nvirtual_stages = 2")
    spec = load(path, ["data.context_window=1000", "packing.queue_thresholds=[0.3, 0.7005]"])
    assert (spec.s_max, spec.queue_thresholds) == (1500, (300, 701))
    assert (spec.num_stages, spec.num_micro_batches, spec.micro_batches_per_pipeline) == (8, 12, 4)
    assert load(path, ["data.row_multiple=6"]).row_multiple == 12


@pytest.mark.parametrize(
    ("given", "meant"), [("7b-128k", "7b_128k"), ("dmeo", "demo"), ("{}/mine.tml", "{}/mine.toml")]
)
def test_a_name_that_is_almost_one_gets_a_suggestion(
    tmp_path: Path, given: str, meant: str
) -> None:
    (tmp_path / "mine.toml").touch()
    with pytest.raises(UserError, match="neither a preset") as refused:
        load(given.format(tmp_path))
    assert str(refused.value).endswith(f"; did you mean {meant.format(tmp_path)!r}?")
