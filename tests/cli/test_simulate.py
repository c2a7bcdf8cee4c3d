"""Tests `wlb simulate`: systems beside each other, files, and what is refused."""

import json
import re

import pytest

from wlb.cli import main
from wlb.spec import SYSTEMS

BASE = ["simulate", "7b_128k", "--synthetic", "wlb_paper", "--steps", "3"]


def simulate(capsys, *words: str) -> str:
    assert main([*BASE, *words]) == 0
    return capsys.readouterr().out


def test_says_what_was_simulated_and_what_took_the_time(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    few = simulate(capsys)
    assert "predicted with kernel profile" not in few
    assert "--all prints every column" in few
    text = simulate(capsys, "--all")
    assert text.splitlines()[:3] == few.splitlines()[:3]
    assert "TP 8, CP 2, PP 4, DP 1 (64 GPUs), interleaved_1f1b with 4 stages a rank" in text
    said = "predicted with kernel profile h100_runs (NVIDIA H100 80GB HBM3; measured: attention"
    assert said in text
    assert "5 published H100 runs with TP, CP or PP were wrong by at most 6%" in text
    assert "All numbers are simulated" in text
    assert "critical path" in text
    assert "shares of the critical path by kind of work: " in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["usual"], ["run"])]
    assert [row[0] for row in rows] == ["usual", "run"]
    said = re.match(
        r"The run would take (\d+\.\d)% (less|more) GPU time than the usual loader on these "
        r"documents \(64 GPUs, simulated; predicted step times of published runs were wrong by at "
        r"most 6%; "
        r"the standard error of the saving is unknown after so few steps; simulate more steps with "
        r"--steps\)",
        " ".join(text.split()),
    )
    assert said is not None
    gain = 1 - 1 / float(rows[1][3])
    assert float(said[1]) / 100 == pytest.approx(abs(gain), abs=1e-3)
    assert (said[2] == "less") == (gain >= 0)
    assert rows[0][3] == "1.000"


def test_every_system_on_the_same_documents(capsys):
    text = simulate(capsys, "--systems", "plain_4d", "fixed_4d", "paper", "wlb", "--json")
    data = json.loads(text)
    runs = {run["label"]: run for run in data["runs"]}
    assert list(runs) == ["plain_4d", "fixed_4d", "paper", "wlb", "run"]
    assert len({run["tokens"] for run in runs.values()}) == 1
    assert runs["paper"]["time_s"] < runs["plain_4d"]["time_s"]
    assert runs["wlb"]["time_s"] < runs["plain_4d"]["time_s"]
    assert data["profile"] == "h100_runs"
    assert "published H100 runs" in data["trust"]
    assert len(runs["run"]["step_time_s"]) == runs["run"]["steps"]
    for run in runs.values():
        assert sum(run["step_time_s"]) == pytest.approx(run["time_s"])


@pytest.mark.parametrize(
    "words",
    [
        ["7b_128k", "--set", "sharding.remainder=one_by_one"],
        ["sft_demo", "--set", "data.num_windows=4"],
        ["demo", "--set", "packing.policy=original", "packing.layout=joined"],
    ],
    ids=["remainder", "method", "layout"],
)
def test_systems_undo_what_contradicts_them(words, capsys):
    systems = ["--systems", *SYSTEMS, "--over-memory"]
    steps = ["--synthetic", "wlb_paper", "--steps", "2", "--json"]
    assert main(["simulate", words[0], *steps, *systems, *words[1:]]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [run["label"] for run in data["runs"]] == [*SYSTEMS, "run"]


def test_a_step_can_be_chosen(capsys):
    assert "Step 1 of the run" in simulate(capsys, "--step", "1")


def test_the_time_is_that_of_the_trace(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    text = simulate(capsys, "--step", "0", "--trace", str(trace), "--json")
    step_s = next(r for r in json.loads(text)["runs"] if r["label"] == "run")["step_time_s"][0]
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in events) * 1e-6 == pytest.approx(step_s, rel=1e-6)


def test_memory_beyond_the_limit_names_rank_stages_and_bytes(capsys):
    assert main([*BASE, "--systems", "--set", "cluster.memory_gib=30"]) == 2
    message = capsys.readouterr().err
    assert "run: pipeline rank 0 (stages 0, 4, 8, 12) needs " in message
    assert "bytes (4" in message
    assert "more than the 24.6 GiB that plans may use of 30 GiB (cluster.memory_gib; " in message
    assert "training.recompute" in message
    assert main([*BASE, "--systems", "--set", "cluster.memory_gib=30", "--over-memory"]) == 0


def test_alternatives_that_do_not_fit_are_passed_over(capsys):
    """On 30B-128K `wlb` needs recomputed MLPs where memory is short."""
    words = ["simulate", "30b_128k", "--synthetic", "wlb_paper", "--steps", "2", "--json"]
    assert main([*words, "--systems", "wlb", "--set", "cluster.memory_gib=70"]) == 0
    wlb, _ = json.loads(capsys.readouterr().out)["runs"]
    assert max(wlb["peak_memory_bytes"]) <= 62.3 * 2**30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "99"], "--step = 99 must be the number of a simulated step"),
        (
            ["--strict", "--set", "cost.profile=h100"],
            "does not cover this run: 1 query heads per KV head",
        ),
        (["--set", "parallel.tp=3"], "is not a multiple of parallel.tp = 3"),
        (["--set", "parallel.pp=3"], "not a multiple of pp 3 x virtual stages 4"),
        (["--set", "cost.profile=nothing"], "nothing"),
        (["--set", "pp.weight_delay=0"], "pp.weight_delay = 0 must be at least 1"),
        (["--set", "cluster.tp_overlap=1.5"], "cluster.tp_overlap = 1.5 must be in [0, 1]"),
        (["--replay", "0"], "--replay = 0 must be at least 1"),
        (["--trace", "/no/such/folder/t.json"], "cannot be written"),
        (["--json", "--replay", "2"], "give --json FILE, or remove --replay"),
    ],
)
def test_refused(capsys, words, message):
    assert main([*BASE, *words]) == 2
    assert message in capsys.readouterr().err


def test_options_that_a_finished_run_does_not_take_are_named(tmp_path, capsys):
    words = [
        "--timeline",
        str(tmp_path / "step.png"),
        "--step",
        "3",
        "--strict",
        "--replay",
        "--over-memory",
    ]
    assert main(["simulate", "--run", str(tmp_path), *words, "--systems", "wlb"]) == 2
    message = capsys.readouterr().err
    assert message.endswith(
        "remove --systems, --step, --timeline, --over-memory, --strict, --replay\n"
    )
    assert main(["simulate", "demo", "--run", str(tmp_path), "--device", "cpu"]) == 2
    assert capsys.readouterr().err.endswith("remove --device, NAME\n")


def test_unknown_systems_are_listed(capsys):
    with pytest.raises(SystemExit):
        main([*BASE, "--systems", "megatron"])
    assert "plain_4d" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.dist
def test_a_replay_is_beside_the_simulation(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    layout = ["parallel.cp=1", "parallel.pp=2", "pp.virtual_stages=2", "data.num_windows=2"]
    text = simulate(capsys, "--systems", "--replay", "1", "--over-memory", "--set", *layout)
    (row,) = [line for line in text.splitlines() if "run, step 0" in line]
    simulated, *replayed = [
        float(x) for x in row.replace("│", " ").split()[3:7]
    ]  # run, step 0 S R R R
    assert all(seconds >= simulated for seconds in replayed)
    assert "largest difference of the median replayed time" in text
