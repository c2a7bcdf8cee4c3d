"""Runs the parts one after the other, each in its own process under its time limit.

A part that crashes or hangs does not stop the others. Its state is written before it starts and
after it ends, so even if the node is lost, the same command resumes with the next part.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.gpu_hour.parts import Part
from experiments.gpu_hour.setting import ROOT, Setting
from experiments.harness.files import write_json

WORKER = "experiments.gpu_hour.worker"
"""The module that a part's process runs."""
GRACE_S = 10
"""Seconds between SIGTERM and SIGKILL of a part that takes too long."""


class State(StrEnum):
    """How far a part came."""

    STARTED = "started"
    """The part started, but its end was never recorded: the machine was lost or killed it."""
    DONE = "done"
    """The process ended with exit status 0."""
    FAILED = "failed"
    """The process ended with another exit status."""
    TOO_LONG = "took too long"
    """The part was stopped at its own time limit."""
    LEFT_OUT = "left out"
    """The part was not started because no time was left."""
    CUT_OFF = "cut off"
    """The part was stopped because the time of all parts was over, before its own limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Outcome of a part, as it is stored in PART/ended.json."""

    name: str
    title: str
    state: State
    seconds: float
    answer: dict[str, Any]  # fields of the part's `Answer`; empty if it gave none
    log_end: str  # last lines of the log, unless the part is done


def ended_of(setting: Setting, part: Part) -> Ended | None:
    """Returns the outcome of a part in an earlier start of gpu_hour, or None."""
    found = read_whole(setting.of(part.name) / "ended.json")
    return Ended(**{**found, "state": State(found["state"])}) if found else None


def read_whole(path: Path) -> dict[str, Any]:
    """Returns the contents of a JSON file, or {} if it is missing or incomplete."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}


def run_parts(
    setting: Setting,
    parts: Sequence[Part],
    console: Console,
    *,
    seconds: float,
    worker: str = WORKER,
) -> list[Ended]:
    """Runs the parts that earlier starts did not finish, and returns the outcomes of all.

    Args:
        setting: The device, and the folder of results.
        parts: Parts in the order in which they run.
        console: Gets a line when a part starts and when it ends.
        seconds: Time for all parts together.
        worker: Module that a part's process runs.
    """
    started = time.monotonic()
    out: list[Ended] = []
    for i, part in enumerate(parts):
        known = ended_of(setting, part)
        if known is not None and known.state in (State.DONE, State.FAILED):
            remedy = _remedy(setting, known)
            console.print(f"{part.name}: {known.state} at an earlier start{remedy}", markup=False)
            out.append(known)
            continue
        left = seconds - (time.monotonic() - started)
        limit = min(part.limit(setting), left)
        if left < GRACE_S:
            out.append(_left_out(part))
            console.print(f"{part.name}: left out, no time is left")
            continue
        console.print(
            f"[{i + 1}/{len(parts)}] {part.name}: {part.title}; at most {limit:.0f} s, all parts "
            f"end in at most {left / 60:.0f} min",
            markup=False,
        )
        too_late = State.CUT_OFF if limit < part.limit(setting) else State.TOO_LONG
        ended = run_part(setting, part, limit_s=limit, too_late=too_late, worker=worker)
        out.append(ended)
        remedy = _remedy(setting, ended)
        console.print(
            f"{part.name}: {ended.state} after {ended.seconds:.0f} s{remedy}", markup=False
        )
    return out


def _remedy(setting: Setting, ended: Ended) -> str:
    """Returns how to repeat a failed part, which the same command would skip; "" for others."""
    if ended.state != State.FAILED:
        return ""
    path = setting.of(ended.name) / "ended.json"
    return f"; to run it again, remove {path} and give the same command"


def _left_out(part: Part) -> Ended:
    return Ended(
        name=part.name, title=part.title, state=State.LEFT_OUT, seconds=0, answer={}, log_end=""
    )


def run_part(
    setting: Setting, part: Part, *, limit_s: float, too_late: State, worker: str = WORKER
) -> Ended:
    """Runs one part in its own process group, and stops the whole group when the part ends.

    Args:
        setting: The device, and the folder of results.
        part: The part.
        limit_s: Seconds after which the part is stopped.
        too_late: State of a part that was stopped.
        worker: Module that the process runs.
    """
    folder = setting.of(part.name)
    (folder / "answer.json").unlink(missing_ok=True)
    began = time.monotonic()

    def ended(state: State) -> Ended:
        made = Ended(
            name=part.name,
            title=part.title,
            state=state,
            seconds=time.monotonic() - began,
            answer=read_whole(folder / "answer.json"),
            log_end="" if state == State.DONE else _last_lines(folder / "log.txt"),
        )
        write_json(folder / "ended.json", asdict(made))
        return made

    (folder / "log.txt").touch()
    ended(State.STARTED)
    given = json.dumps({**asdict(setting), "folder": str(setting.folder)})
    command = [sys.executable, "-m", worker, part.name, given]
    with open(folder / "log.txt", "ab") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_group(process)
    if status is None:
        return ended(too_late)
    return ended(State.FAILED if status else State.DONE)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Stops the process and all processes that it started, by SIGTERM and then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(GRACE_S if number == signal.SIGTERM else None)
        except subprocess.TimeoutExpired:
            continue


def _last_lines(path: Path, count: int = 40) -> str:
    return "\n".join(path.read_text("utf-8", errors="replace").splitlines()[-count:])
