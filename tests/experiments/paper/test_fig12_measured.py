"""Tests Figure 12's measured row on the recorded steps of an H100."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.harness.constants import KERNELS
from experiments.paper.fig12.measured import SIMULATED, main, measured, read_systems, row_table
from wlb.data import open_store
from wlb.plan import UserError
from wlb.report.run.records import read_run
from wlb.spec import load

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "experiments/gpu_hour/results/h100_2026-11-26/billion_32k"
WARM_UP = 3


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def copy_of(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """Writes the recorded run as a run of another system, each line changed."""
    made = folder / name
    shutil.copytree(RECORDED, made)
    lines = lines_of(made)
    for line in lines:
        change(line)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (made / "metrics.jsonl").write_text(text, "utf-8")
    return made


def as_it_was(line: dict[str, Any]) -> None:
    del line


def faster(line: dict[str, Any]) -> None:
    """Each step takes half as long, has three quarters of the tokens and nine tenths of the FLOPs.
    The first steps take an hour.
    """
    if line["kind"] != "step":
        return
    step = line["measured"]
    step["step_time_s"] = step["step_time_s"] / 2 if line["steps_done"] > WARM_UP else 3600.0
    step["num_tokens"] = step["num_tokens"] * 3 // 4
    work = step["telemetry"]["work"]
    work["rank_s"] /= 2
    work["model_flops"] *= 0.9


def test_steps_after_the_warm_up_are_counted() -> None:
    found = measured(read_run(RECORDED))
    steps = [line["measured"] for line in lines_of(RECORDED) if line["kind"] == "step"][WARM_UP:]
    assert found.num_steps == len(steps) > 2
    tokens, time_s = (sum(s[key] for s in steps) for key in ("num_tokens", "step_time_s"))
    assert (found.num_tokens, found.time_s) == (tokens, pytest.approx(time_s))
    assert found.held_tokens == steps[-1]["num_held_tokens"]


def test_the_row_divides_by_plain_4d_and_leads_with_it(tmp_path: Path) -> None:
    fast = copy_of(tmp_path, "paper", faster)
    plain = copy_of(tmp_path, "plain_4d", as_it_was)
    systems = read_systems([fast, plain])
    table = row_table("7b_128k", systems)
    first, second = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert (first["system"], second["system"]) == ("Plain-4D", "WLB-LLM")
    assert first["tokens/s over Plain-4D"] == first["FLOP/s over Plain-4D"] == 1.0
    assert second["tokens/s over Plain-4D"] == pytest.approx(1.5, abs=1e-3)
    assert second["FLOP/s over Plain-4D"] == pytest.approx(1.8)
    # Beside them stands what the page of Figure 12 says of this configuration.
    page = (ROOT / "experiments/paper/fig12/results/README.md").read_text("utf-8")
    for column, kernel in zip(SIMULATED, KERNELS.values(), strict=True):
        cells = next(row for row in page.splitlines() if f"| {kernel} | 7B-128K |" in row)
        assert first[column] == 1.0
        assert f"{second[column]:.3f}" == cells.split("|")[5].strip()
    assert row_table("demo", systems).rows[1][3:5] == [None, None]


def test_only_runs_that_differ_in_their_system_are_compared(tmp_path: Path) -> None:
    def other_seed(line: dict[str, Any]) -> None:
        if line["kind"] == "start":
            line["spec"]["run"]["seed"] += 1

    plain = copy_of(tmp_path, "plain_4d", as_it_was)
    other = copy_of(tmp_path, "wlb", other_seed)
    with pytest.raises(UserError, match=r"wlb has run\.seed = 1, and plain_4d has 0"):
        read_systems([plain, other])
    with pytest.raises(UserError, match="no RUN is named plain_4d"):
        read_systems([other])


def test_a_run_that_ended_in_its_warm_up_is_refused(tmp_path: Path) -> None:
    def short(line: dict[str, Any]) -> None:
        if line["kind"] == "start":
            line["spec"]["telemetry"]["warmup_steps"] = 10**6

    with pytest.raises(UserError, match="0 timed steps after its warm-up"):
        measured(read_run(copy_of(tmp_path, "plain_4d", short)))


def test_documents_are_enough_for_the_steps_and_fit_the_window(tmp_path: Path) -> None:
    sizes = ("data.context_window=512", "data.num_windows=2", "data.row_multiple=1")
    words = ("--steps", "7", "--out", str(tmp_path / "documents"), "--set", *sizes)
    main(["documents", "7b_128k", *words])
    store = open_store(str(tmp_path / "documents"))
    needed = 7 * load("7b_128k", list(sizes)).tokens_per_step
    assert needed < store.lengths.sum() < 1.3 * needed
    assert store.lengths.max() <= 512


def test_the_command_prints_the_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [copy_of(tmp_path, name, as_it_was) for name in ("plain_4d", "wlb")]
    main(["row", "7b_64k", *map(str, folders)])
    said = capsys.readouterr().out
    assert "Figure 12, measured: 7B-64K" in said
    assert "ours" in said
    with pytest.raises(SystemExit) as ended:
        main(["row", "7b_64k", str(folders[1])])
    assert ended.value.code == 2
    assert "no RUN is named plain_4d" in capsys.readouterr().err
