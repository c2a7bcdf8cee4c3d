"""Tests that a trained run is planned and simulated again, and that another run is refused."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.train.case import Run, small_spec, write_corpus
from wlb.cli.main import main
from wlb.report.run.page import run_page
from wlb.report.run.records import read_run
from wlb.report.run.simulated import simulate_step
from wlb.spec import AttentionBackend
from wlb.train import start
from wlb.validation import recorded
from wlb.validation.recorded import simulate_recorded

pytestmark = [pytest.mark.process, pytest.mark.full]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("recorded")
    spec = small_spec(folder, write_corpus(folder / "corpus"), eval={"steps": 0})
    start.train(spec, resume=None, console=Console(file=StringIO()))
    return Run(spec)


def test_every_step_is_simulated_from_the_plan_that_was_trained(run: Run) -> None:
    made = simulate_recorded(run.folder, skip=0)
    assert [m.step for m in made.measured] == [s["measured"]["step"] for s in run.steps]
    assert made.measured_s.tolist() == [s["measured"]["step_time_s"] for s in run.steps]
    tokens = np.concatenate([s.prices.tokens.sum(axis=(1, 2)) for s in made.simulations])
    padding = [s["measured"]["num_filler_tokens"] for s in run.steps]
    assert tokens.tolist() == [
        s["measured"]["num_tokens"] + f for s, f in zip(run.steps, padding, strict=True)
    ]
    assert made.simulated_s.shape == (6,)
    errors = np.abs(made.simulated_s - made.measured_s) / made.measured_s
    assert made.mape == pytest.approx(errors.mean())
    assert made.ratio == pytest.approx(made.simulated_s.sum() / made.measured_s.sum())


def test_first_steps_are_left_out_and_another_profile_prices(run: Run) -> None:
    own, other = (
        simulate_recorded(run.folder, skip=2),
        simulate_recorded(run.folder, profile="h100"),
    )
    assert [m.step for m in own.measured] == [2, 3, 4, 5]
    assert (other.simulated_s[2:] < own.simulated_s).all()
    with pytest.raises(
        ValueError, match=r"metrics\.jsonl has no step left to compare after the first 6"
    ):
        simulate_recorded(run.folder, skip=6)


def test_a_run_of_a_gpu_is_simulated_on_a_cpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    records = read_run(run.folder)
    kernels = replace(records.spec.kernels, attention=AttentionBackend.TORCH_VARLEN)
    records.spec = replace(
        records.spec, kernels=kernels, cost=replace(records.spec.cost, profile="auto")
    )
    records.starts[-1]["device"] = "cuda"
    monkeypatch.setattr(recorded, "read_run", lambda folder: records)
    gpu, cpu = simulate_recorded(run.folder, profile="h100", skip=0), records.steps[-1].memory_bytes
    assert gpu.profile.name == "h100"
    assert gpu.peak_bytes == cpu
    assert gpu.estimated_bytes == max(int(s.peak_memory_bytes.max()) for s in gpu.simulations) > 0
    records.starts[-1]["device"] = "cpu"
    assert simulate_recorded(run.folder, skip=0).peak_bytes is None


def copied(run: Run, folder: Path) -> Path:
    (folder / "checkpoints").symlink_to(run.folder / "checkpoints")
    return folder


def test_plans_that_are_not_those_that_were_trained_are_refused(run: Run, tmp_path: Path) -> None:
    lines = [json.loads(json.dumps(line)) for line in run.lines]
    was = lines[3]["measured"]["num_tokens"]
    lines[3]["measured"]["num_tokens"] = was - 1
    folder = copied(run, tmp_path)
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    problem = rf"step 2 again gives num_tokens = {was}, but .*metrics\.jsonl has {was - 1}"
    with pytest.raises(ValueError, match=problem):
        simulate_recorded(folder, skip=0)


def test_only_steps_since_the_last_start_count(run: Run, tmp_path: Path) -> None:
    lines = [*run.lines[:5], {"kind": "start", "resumed_from": "x"}, *run.lines[5:]]
    folder = copied(run, tmp_path)
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    assert [m.step for m in simulate_recorded(folder, skip=0).measured] == [4, 5]


def test_half_a_line_of_a_run_that_was_killed_is_passed_over(run: Run, tmp_path: Path) -> None:
    folder = copied(run, tmp_path)
    text = (run.folder / "metrics.jsonl").read_text("utf-8")
    (folder / "metrics.jsonl").write_text(text + text.splitlines()[-2][:40], "utf-8")
    assert len(simulate_recorded(folder, skip=0).measured) == 6


def test_folders_without_a_finished_run_are_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"metrics\.jsonl does not exist; give the folder of a run"
    ):
        simulate_recorded(tmp_path)
    started, *steps = run.lines
    assert started.pop("spec")
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, [started, *steps])), "utf-8")
    with pytest.raises(ValueError, match="the configuration of the run is neither in"):
        simulate_recorded(tmp_path)


def test_a_run_without_a_checkpoint_has_its_configuration_in_its_lines(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_bytes((run.folder / "metrics.jsonl").read_bytes())
    assert len(simulate_recorded(tmp_path, skip=0).measured) == 6


def test_the_command(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--run", str(run.folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "(without 3 steps of warm-up)" in shown
    words = ["simulate", "--run", str(run.folder), "--set", "cost.profile=h100", "--json"]
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["profile"], data["steps"]) == ("h100", [3, 4, 5])
    assert main(["simulate", "--run", str(run.folder), "--set", "run.seed=1"]) == 2
    assert "--set may change only cost.profile; remove run.seed=1" in capsys.readouterr().err


def test_a_step_of_a_run_is_simulated_for_its_page_from_its_lines_alone(run: Run) -> None:
    records = read_run(run.folder)
    made = simulate_step(records, records.at(3))
    (whole,) = simulate_recorded(run.folder, skip=2).simulations
    assert made.step_time_s.tolist() == whole.step_time_s[:1].tolist()
    assert "Simulated, not measured" in run_page(records, step=3)
    assert "Measured</strong>: step 6" in run_page(records)
    changed = records.at(3)._replace(measured=replace(records.at(3).measured, num_tokens=1))
    with pytest.raises(ValueError, match=r"step 2 again gives num_tokens = \d+, but .* has 1"):
        simulate_step(records, changed)


def test_steps_that_were_planned_with_learned_prices_are_left_out_and_said(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As versions with `cost.online` wrote them."""
    lines = [dict(line) for line in run.lines]
    steps = [line for line in lines if line["kind"] == "step"]
    for line in steps[5:]:
        line["prices"] = {"attention_forward": 1_300_000}
    folder = copied(run, tmp_path)
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    made, whole = (simulate_recorded(at, skip=2) for at in (folder, run.folder))
    assert [m.step for m in made.measured] == [2, 3, 4]
    assert made.simulated_s.tolist() == whole.simulated_s[:3].tolist()
    said = "step 6 and later steps cannot be simulated: they were planned with cost.online"
    assert main(["simulate", "--run", str(folder)]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["simulate", "--run", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["remark"].startswith(said)
    with pytest.raises(ValueError, match=rf"metrics\.jsonl has no step to compare: {said}"):
        simulate_recorded(folder, skip=5)
    records = read_run(folder)
    assert simulate_step(records, records.at(5)).step_time_s.size == 1
    with pytest.raises(ValueError, match=said):
        simulate_step(records, records.at(6))
