"""Tests `wlb profile`: a whole small sweep, its files, resuming after an interruption, errors."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.profile.counting import CountingTimer
from tests.words import lacks
from wlb.cli import main
from wlb.cli.profile import _names, visible_gpus
from wlb.cost import ProvenanceKind, load_profile
from wlb.profile import sweep
from wlb.profile.attention import AttentionGrid
from wlb.profile.tasks import Task
from wlb.profile.timing import make_timer
from wlb.spec import load

GRID = AttentionGrid(
    lengths=(8, 16, 32, 64, 128),
    held_pairs=3,
    batches=6,
    held_batches=3,
    batch_tokens=(128, 256),
    budget_s=0.001,
)


@pytest.fixture
def small(monkeypatch):
    """Makes sweeps take a few seconds, without a clock, and returns what was measured."""
    original = sweep.settings_of

    def settings(*args, **options):
        made = original(*args, **options)
        budgets = {"linear_budget_s": 0.001, "collective_budget_s": 0.001}
        return replace(made, grid=GRID, tokens=(16, 64), **budgets)

    monkeypatch.setattr("wlb.profile.settings_of", settings)
    monkeypatch.setattr(sweep, "make_timer", CountingTimer)
    measured: list[str] = []
    run = sweep.RecordFile.run

    def counted(self, tasks):
        known = set(self.records)
        for record in run(self, tasks):
            if next(t for t in tasks if t.point == record.point).key not in known:
                measured.append(record.kind)
            yield record

    monkeypatch.setattr(sweep.RecordFile, "run", counted)
    return measured


def profile(folder: Path, *words: str) -> int:
    out = str(folder / "mine.json")
    return main(["profile", "--device", "cpu", "--out", out, *words])


@pytest.mark.full
@pytest.mark.dist
def test_a_sweep_writes_a_profile_plots_and_a_log(small, tmp_path, capsys):
    assert profile(tmp_path, "--heads", "4:2x16") == 0
    made = load_profile(str(tmp_path / "mine.json"))
    assert made.name == "mine"
    assert made.provenance.kind == ProvenanceKind.MEASURED
    assert made.provenance.command.startswith("wlb profile --device cpu --out ")
    environment = made.provenance.environment
    assert environment["torch"] == torch.__version__
    (start,) = environment["starts"]
    assert "read from NVIDIA GPUs only" in start["conditions"]["why_empty"]
    assert (start["date"], start["command"]) == (made.provenance.date, made.provenance.command)
    layouts = [(t.backends, t.num_heads, t.num_kv_heads, t.head_dim) for t in made.attention]
    # The demo's two heads of 16 at TP 2 and 1, and the one asked for.
    assert layouts == [(("sdpa",), 1, 1, 16), (("sdpa",), 2, 2, 16), (("sdpa",), 4, 2, 16)]
    kinds = {(c.scope, c.provenance.kind) for c in made.collectives}
    assert kinds == {("intra_node", "measured"), ("inter_node", "assumed")}
    printed = capsys.readouterr().out
    # What is to be done, where it goes and for how long is said before anything is measured.
    begin = printed.partition("about ")[0]
    assert lacks(begin, str(tmp_path / "mine.json"), "mine_plots/", "mine.log", "measures ") == []
    assert lacks(begin, "float32", "points of attention (sdpa of 1:1 heads of 16") == []
    assert re.search(r"; this takes about \d+ min, in which nothing else should run", printed)
    log = (tmp_path / "mine.log").read_text("utf-8")
    residuals = dict(made.provenance.residuals)
    for text in (printed, log):
        assert f"{residuals['retest_total']:.1%}" in text
        assert "mine.json" in text
    plots = {path.stem: path.read_bytes() for path in (tmp_path / "mine_plots").iterdir()}
    assert {"figure7", "gemm", "collectives", "held_out-sdpa-4-2x16"} <= set(plots)
    assert all(png.startswith(b"\x89PNG") for png in plots.values())


@pytest.mark.full
@pytest.mark.dist
def test_records_give_a_node_as_many_ranks_as_is_said_and_no_other_sweep(small, tmp_path, capsys):
    assert profile(tmp_path, "--no-plots") == 0
    assert load_profile(str(tmp_path / "mine.json")).ranks_per_node == 1024
    assert profile(tmp_path, "--no-plots", "--ranks-per-node", "4") == 0
    assert load_profile(str(tmp_path / "mine.json")).ranks_per_node == 4
    assert profile(tmp_path, "--no-plots", "--ranks-per-node", "0") == 2
    assert "--ranks-per-node = 0 must be at least 1" in capsys.readouterr().err
    # The records are kept for the same sweep alone.
    assert profile(tmp_path, "--no-plots", "--set", "model.hidden_size=96") == 2
    told = capsys.readouterr().err
    assert (
        "mine.sweep.jsonl has measurements made under other conditions (model.hidden_size: " in told
    )
    assert " in the file, 96 now); remove the file" in told
    assert "remove the file or give another --out" in told


@pytest.mark.parametrize(("visible", "expected"), [(0, None), (1, None), (4, 4)])
def test_gpus_of_a_node_are_those_that_are_visible(monkeypatch, visible, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert visible_gpus("cuda") == expected
    assert visible_gpus("cpu") is None


@pytest.mark.full
@pytest.mark.dist
def test_an_interrupted_sweep_goes_on(small, tmp_path, capsys):
    assert profile(tmp_path, "--no-plots") == 0
    whole = list(small)
    records = tmp_path / "mine.sweep.jsonl"
    header, *lines, start = records.read_text("utf-8").splitlines(keepends=True)
    assert len(lines) == json.loads(start)["start"]["points"] == len(whole)
    # Killed in the middle of a line, after most of the points.
    records.write_text("".join([header, *lines[:-4], start, lines[-4][:20]]), "utf-8")
    small.clear()
    assert profile(tmp_path, "--no-plots", "--set", "model.rope_theta=10000.0") == 0
    assert len(small) == 4
    told = " ".join(capsys.readouterr().out.split())
    assert f"an earlier start measured {len(whole) - 4} of {len(whole)} points" in told
    # Both starts are told, and the profile is stamped with the last one that measured something.
    for _ in range(2):
        made = load_profile(str(tmp_path / "mine.json"))
        points = [start["points"] for start in made.provenance.environment["starts"]]
        assert points == [len(whole), 4]
        assert "rope_theta" in made.provenance.command
        assert profile(tmp_path, "--no-plots") == 0


@pytest.mark.dist
@pytest.mark.full
def test_a_point_out_of_memory_is_told_and_the_rest_is_fitted(small, tmp_path, capsys, monkeypatch):
    def collectives(*_, **__):
        return sweep_of_nothing()

    from wlb.profile.collectives import CollectiveSweep

    def sweep_of_nothing():
        return CollectiveSweep(tasks=[], note="none")

    monkeypatch.setattr(sweep, "collective_tasks", collectives)
    original = sweep.grid_tasks

    def tasks(*args):
        made = original(*args)

        def fail():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB\nmore")

        return [
            replace(t, run=fail) if (t.point["q"], t.point["kv"]) == (8, 128) else t for t in made
        ]

    monkeypatch.setattr(sweep, "grid_tasks", tasks)
    assert profile(tmp_path, "--no-plots") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert re.search(r"not measured: grid .*'q': 8, 'kv': 128.*Tried to allocate 80 GiB", told)
    made = load_profile(str(tmp_path / "mine.json"))
    assert {c.provenance.kind for c in made.collectives} == {ProvenanceKind.ASSUMED}
    assert "not measured: profile cpu" in made.collectives[0].provenance.source
    lines = (tmp_path / "mine.sweep.jsonl").read_text("utf-8").splitlines()[1:]
    failed = [record for line in lines if (record := json.loads(line)).get("failed")]
    assert failed
    assert all("Tried to allocate 80 GiB" in record["failed"] for record in failed)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "cutlass"], "--backend 'cutlass' is not one of flash_attention_3, "),
        (
            ["--backend", "torch_varlen"],
            "kernels.attention = torch_varlen cannot be used for this run",
        ),
        (["--heads", "8"], "--heads '8' is not a head layout; give QUERY"),
        (["--heads", "٨x64"], "--heads '٨x64' is not a head layout; give QUERY"),
        (["--heads", "8:3x64"], "--heads '8:3x64' is not a head layout"),
        (["--preset", "nothing"], "nothing"),
        (["--out", "mine.txt"], "mine.txt must end in .json"),
    ],
)
def test_bad_input_is_refused(tmp_path, capsys, words, message):
    assert profile(tmp_path, *words) == 2
    assert message in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_is_refused_where_there_is_none(tmp_path, capsys):
    assert main(["profile", "--device", "cuda", "--out", str(tmp_path / "x.json")]) == 2
    assert "0 GPUs" in capsys.readouterr().err


def test_a_folder_gets_the_files_of_the_device_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = argparse.Namespace(out=tmp_path, name=None)
    assert _names(options, "NVIDIA H200") == (tmp_path / "h200.json", "h200")
    options = argparse.Namespace(out=None, name=None)
    assert _names(options, "NVIDIA H200") == (Path("h200.json"), "h200")
    options = argparse.Namespace(out=tmp_path / "mine.json", name=None)
    assert _names(options, "NVIDIA H200") == (tmp_path / "mine.json", "mine")


def test_the_time_of_a_sweep_is_known_before_it_starts() -> None:
    device = torch.device("cpu")
    quick, whole = (
        sweep.settings_of(load("demo"), device=device, backend=None, heads=[], quick=quick)
        for quick in (True, False)
    )
    times = [
        sweep.expected_s(made, sweep.tasks_of(made, make_timer(device))) for made in (quick, whole)
    ]
    # They took 19 and 319 s on a CPU.
    assert times == pytest.approx([24, 304], rel=0.01)
    (task,) = (Task(kind="grid", point={}, run=dict) for _ in range(1))
    said = sweep.describe_sweep(whole, [task] * 10, 3)
    assert lacks(said, ": 10 points of attention", ", 0 of matrix", "3 of collectives") == []
    assert "about 1 min" in said
