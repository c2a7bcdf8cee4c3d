"""Tests `wlb tune layout` from the command line: what it prints and writes, what it refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sets import full
from wlb.cli import main
from wlb.cli.tune_layout import winning_spec
from wlb.report.layout import COLUMNS
from wlb.spec import load

SMALL = ["--device", "cpu", "--steps", "4", "--jobs", "1", "--top", "3"]
SETTINGS = ["--set", "data.context_window=2048", "data.num_windows=4"]


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("lengths") / "lengths.npy"
    draw = np.random.default_rng(0)
    np.save(path, np.minimum(draw.lognormal(5, 1.5, 800).astype(np.int64) + 1, 6000))
    return str(path)


@pytest.fixture(scope="module")
def made(lengths: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Runs a search of `demo` on 8 devices with all outputs written."""
    folder = tmp_path_factory.mktemp("tuned")
    paths = {name: str(folder / f"made.{name}") for name in ("toml", "json")}
    words = ["tune", "layout", "demo", "--gpus", "8", "--lengths", lengths, *SMALL, *SETTINGS]
    code = main([*words, "--out", paths["toml"], "--json", paths["json"]])
    assert code == 0
    return {**paths, "words": words, "data": json.loads(Path(paths["json"]).read_text("utf-8"))}


@pytest.mark.full
def test_the_winner_is_written_as_a_run(made: dict[str, Any]) -> None:
    spec, best = load(made["toml"]), made["data"]["best"][0]
    given = load("demo", SETTINGS[1:])
    assert winning_spec(given, spec) == spec
    assert spec.parallel.world_size == 8
    assert spec.model == given.model
    assert spec.data == given.data
    assert spec.planner == given.planner
    for section in ("parallel", "ep", "pp", "packing", "sharding"):
        assert spec.to_dict()[section] == best["spec"][section]
    assert spec.training.recompute == best["spec"]["training"]["recompute"]
    text = Path(made["toml"]).read_text("utf-8")
    assert "# found by: wlb tune layout demo --gpus 8" in text


@pytest.mark.full
def test_a_run_with_a_grouping_method_is_searched_one_with_hsdp_refused(
    lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--lengths", lengths, *SMALL, "--json", "--policies", "fixed", "bounded"]
    assert main(["tune", "layout", "sft_demo", "--gpus", "2", *words]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert {trial["spec"]["packing"]["method"] for trial in best} == {""}
    hsdp = [*SETTINGS, "fsdp.shard_size=2"]
    assert main(["tune", "layout", "demo", "--gpus", "8", *words, *hsdp]) == 2
    assert "must be 0 in a search for layouts" in capsys.readouterr().err


def test_json_has_the_best_and_why_others_lost(made: dict[str, Any]) -> None:
    data = made["data"]
    times = [trial["s_per_batch"] for trial in data["best"]]
    assert times == sorted(times)
    assert len(times) == 3
    assert data["own"]["layout"].startswith("tp 2 cp 2 pp 2 dp 1 interleaved_1f1b v 2")
    assert sum(data["best"][0]["terms"].values()) == pytest.approx(times[0])
    families = {loser["family"] for loser in data["losers"]}
    assert families & {"tp 1", "tp 2"}
    reasons = {refused["reason"] for refused in data["refused"]}
    assert "tp does not divide the model" in reasons
    assert {t["sharding"] for t in data["strategies"]} == {"balanced", "hybrid", "adaptive"}


@pytest.mark.full
def test_the_table_fits_terminals(
    lengths: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["tune", "layout", "demo", "--gpus", "4", "--lengths", lengths, *SMALL, *SETTINGS]
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main([*words, "--tp", "2"]) == 0
        out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
        assert max(len(line) for line in out.splitlines()) <= width
        table, caption, _ = out.partition("All numbers are simulated")
        assert caption
        assert [name for name in COLUMNS if name not in table] == []
        assert "column gain is empty" not in out
        assert "present layout is not compared: too few ranks" in " ".join(out.split())


@pytest.mark.full
def test_json_on_stdout_is_the_same_twice(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", "layout", "demo", "--gpus", "2", "--lengths", lengths, *SMALL, *SETTINGS]
    words += ["--pp", "2", "--json"]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert main(words) == 0
    assert capsys.readouterr().out == first
    assert json.loads(first)["gpus"] == 2


@pytest.mark.full
def test_another_global_batch_keeps_tokens(
    lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tune", "layout", "demo", "--gpus", "2", "--lengths", lengths, *SMALL, *SETTINGS]
    assert main([*words, "--global-batch-tokens", "16384", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    for trial in data["best"]:
        assert trial["spec"]["data"]["num_windows"] == 8
        assert 8 % trial["spec"]["parallel"]["dp"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "0"], "--gpus = 0 must be at least 1"),
        (["--gpus", "8", "--top", "0"], "--top = 0 must be at least 1"),
        (["--gpus", "8", "--jobs", "-1"], "--jobs = -1 must be at least 0"),
        (["--gpus", "8", "--max-delay-mean", "-1"], "must be in [0, inf)"),
        (
            ["--gpus", "8", "--tp", "3"],
            "tp = 3 must be a divisor of the number of devices, 8; choose from 1, 2, 4, 8",
        ),
        (["--gpus", "8", "--tp", "8", "--cp", "8"], "no layout of 8 devices satisfies"),
        (["--gpus", "8", "--virtual-stages", "0"], "virtual_stages = 0 must be at least 1"),
        (["--gpus", "8", "--global-batch-tokens", "3000"], "such as 2048"),
        (["--gpus", "8", "--global-batch-tokens", "0"], "must be a multiple of"),
        (["--gpus", "8", "--out", "/nowhere/best.toml"], "/nowhere/best.toml cannot be written"),
        (["--gpus", "8", "--set", "cluster.memory_gib=0.001"], "lacks the least memory is tp "),
        *full(
            (["--gpus", "8", "--max-delay-mean", "0", "--policies", "bounded"], "raise --max-delay")
        ),
    ],
)
def test_bad_input_is_refused(
    words: list[str], message: str, lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["tune", "layout", "demo", "--lengths", lengths, *SMALL, *SETTINGS]
    assert main([*base, *words]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error
    assert "Traceback" not in error


@pytest.mark.process
@pytest.mark.full
def test_no_torch_is_imported(lengths: str) -> None:
    code = (
        "import sys; from wlb.cli import main; "
        f"main(['tune', 'layout', 'demo', '--gpus', '2', '--lengths', {lengths!r}, '--pp', '2', "
        f"*{[*SMALL, *SETTINGS]!r}]); print([m for m in sys.modules if m.startswith('torch')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "[]"


def test_training_takes_the_winner(
    made: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "texts"
    corpus.mkdir()
    draw = np.random.default_rng(1)
    for i in range(60):
        words = draw.integers(0, 500, size=int(draw.integers(20, 2000)))
        (corpus / f"{i}.txt").write_text(" ".join(f"w{w}" for w in words), "utf-8")
    words = ["train", made["toml"], "--dry-run", "--set", f"data.corpus={corpus}"]
    assert main([*words, f"run.output_dir={tmp_path}", "run.device=cpu"]) == 0
    out = capsys.readouterr().out
    assert "First plan, pipeline 0" in out
