"""Tests that a part which breaks costs only itself, and that all appear in the page."""

import json
import os
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from experiments.gpu_hour import running
from experiments.gpu_hour.page import document, write_page
from experiments.gpu_hour.parts import Part
from experiments.gpu_hour.running import Ended, State, ended_of, run_parts
from experiments.gpu_hour.setting import Answer, Setting, Verdict

pytestmark = pytest.mark.process
PLANTED = "tests.experiments.gpu_hour.planted"


def part(name: str, limit_s: int = 300) -> Part:
    return Part(
        name=name,
        title=f"what {name} does",
        answer=lambda setting: Answer(),
        limit_s=limit_s,
        quick_limit_s=limit_s,
    )


def setting_of(folder: Path) -> Setting:
    return Setting(folder=folder, device="cpu", gpus=0, quick=True)


def run(folder: Path, *parts: Part, seconds: float = 3600) -> tuple[list[Ended], str]:
    shown = StringIO()
    console = Console(file=shown, width=200, highlight=False)
    found = run_parts(setting_of(folder), parts, console, seconds=seconds, worker=PLANTED)
    return found, shown.getvalue()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Ended]]:
    folder = tmp_path_factory.mktemp("hour")
    names = ("good", "wrong_kernel", "raises", "dies")
    return folder, run(folder, *map(part, names), part("hangs", limit_s=15))[0]


@pytest.mark.full
def test_each_part_ends_as_it_does_and_the_next_one_runs(broken: tuple[Path, list[Ended]]) -> None:
    states = {ended.name: ended.state for ended in broken[1]}
    assert states == {
        "good": State.DONE,
        "wrong_kernel": State.DONE,
        "raises": State.FAILED,
        "dies": State.FAILED,
        "hangs": State.TOO_LONG,
    }
    logs = {ended.name: ended.log_end for ended in broken[1]}
    assert "RuntimeError: planted" in logs["raises"]
    assert "the log of dies" in logs["dies"]
    assert logs["good"] == ""


@pytest.mark.full
def test_a_part_that_hangs_leaves_no_process(broken: tuple[Path, list[Ended]]) -> None:
    child = int((broken[0] / "hangs" / "child").read_text())
    for _ in range(600):
        if not _lives(child):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {child} of the part lives on")


def _lives(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.full
def test_faults_are_in_the_table_of_claims_and_on_the_page(
    broken: tuple[Path, list[Ended]], tmp_path: Path
) -> None:
    made = document(setting_of(tmp_path), broken[1], {"device": "cpu"})
    verdicts = {row["claim"]: (row["measured"], row["verdict"]) for row in made["claims"]}
    kernels = "kernels equal their definition, layouts equal one process"
    assert verdicts[kernels] == ("0 pass, 1 fail, 0 skipped", "failed")
    assert verdicts["what dies does"] == ("failed", "failed")
    assert verdicts["what hangs does"] == ("took too long", "failed")
    assert verdicts["a step"] == ("1 s", "holds")
    assert verdicts["another step"] == ("1 s", "differs")
    assert json.loads(json.dumps(made)) == made
    page = write_page(made, tmp_path / "page.html").read_text()
    assert "2 claims hold, 1 differ, 4 failed" in page
    assert "RuntimeError: planted" in page
    assert page.index("what hangs does") < page.index("RuntimeError: planted")


def test_a_second_start_goes_on_behind_what_ended(tmp_path: Path) -> None:
    run(tmp_path, part("good"))
    first = ended_of(setting_of(tmp_path), part("good"))
    found, shown = run(tmp_path, part("good"), part("raises"))
    assert "good: done at an earlier start" in shown
    assert found[0] == first
    assert found[1].state == State.FAILED


def test_a_part_that_was_cut_off_is_run_again(tmp_path: Path) -> None:
    run(tmp_path, part("good"))
    path = tmp_path / "good" / "ended.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"state": "started"}))
    found, shown = run(tmp_path, part("good"))
    assert "earlier start" not in shown
    assert found[0].state == State.DONE


def test_a_part_that_the_end_of_the_hour_cuts_off_is_kept_so_and_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "GRACE_S", 1)
    found, shown = run(tmp_path, part("hangs"), seconds=3)
    assert [ended.state for ended in found] == [State.CUT_OFF]
    assert "hangs: cut off after" in shown
    assert ended_of(setting_of(tmp_path), part("hangs")) == found[0]
    assert not document(setting_of(tmp_path), found, {})["claims"]
    again, shown = run(tmp_path, part("hangs", limit_s=2))
    assert again[0].state == State.TOO_LONG
    assert "earlier start" not in shown


def test_a_part_that_failed_says_how_to_run_it_again(tmp_path: Path) -> None:
    shown = run(tmp_path, part("raises"))[1].replace("\n", "")
    path = tmp_path / "raises" / "ended.json"
    remedy = f"; to run it again, remove {path} and give the same command"
    assert remedy in shown
    shown = run(tmp_path, part("raises"))[1].replace("\n", "")
    assert f"raises: failed at an earlier start{remedy}" in shown
    path.unlink()
    assert "earlier start" not in run(tmp_path, part("raises"))[1]


def test_without_time_parts_are_left_out_and_said(tmp_path: Path) -> None:
    found, shown = run(tmp_path, part("good"), seconds=1)
    assert [ended.state for ended in found] == [State.LEFT_OUT]
    assert "good: left out, no time is left" in shown
    assert not document(setting_of(tmp_path), found, {})["claims"]


@pytest.mark.parametrize(
    ("claimed", "measured", "verdict"),
    [(1.1, 1.0, Verdict.HOLDS), (0.9, 1.0, Verdict.HOLDS), (1.11, 1.0, Verdict.DIFFERS)],
)
def test_within_holds_up_to_its_share(claimed: float, measured: float, verdict: Verdict) -> None:
    answer = Answer()
    answer.within("x", claimed, measured, share=0.1000001, unit="s")
    assert answer.rows[0].verdict == verdict
    assert f"{claimed:.4g} s ({claimed / measured - 1:+.1%})" == answer.rows[0].claimed
    assert os.sep not in answer.rows[0].claimed
