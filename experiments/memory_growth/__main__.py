"""Measures whether the memory of a long training run grows.

`python -m experiments.memory_growth [--minutes 60]` trains the demo over and over on its corpus,
with checkpoints and evaluations, until a stop file ends it. The anonymous memory of each of its
processes is read every few seconds; `growth` compares quarters of the time. --again makes the page
again from the last run's minutes.csv.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from experiments.harness.drawing import COLOURS, LINES, new_figure
from experiments.harness.pages import How, Picture, Table, show, write_results
from wlb.cost.flops import FloatArray

EVERY_S = 5.0
COLUMNS = ("process", "minute", "least (MiB)")
QUARTERS = 4
"""Growth leaves out the first quarter, in which buffers grow to the longest micro-batch."""
SETTINGS = {
    "training.steps": 1_000_000,
    "training.schedule": "constant",
    "checkpoint.interval": 50,
    "checkpoint.keep": 2,
    "eval.interval": 100,
    "run.name": "demo",
    "run.device": "cpu",
}


@dataclass
class Trace:
    """Holds the readings of one process.

    at_s: time of each reading since the start, in seconds
    mib: anonymous resident memory at that time, in MiB
    """

    role: str
    at_s: list[float] = field(default_factory=list[float])
    mib: list[float] = field(default_factory=list[float])


def family(pid: int) -> list[int]:
    """Returns the ids of a process and its descendants, parents before their children."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                # The process has ended in the meantime.
                continue
    return found


def anonymous_mib(pid: int) -> float | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    kib = [int(line.split()[1]) for line in lines if line.startswith("RssAnon")]
    return kib[0] / 1024 if kib else None


def watch(process: subprocess.Popen[bytes], minutes: float, stop: Path) -> list[Trace]:
    """Reads memory until the run ends and returns its long-lived processes' traces."""
    traces: dict[int, Trace] = {}
    begin = time.monotonic()
    while process.poll() is None:
        now = time.monotonic() - begin
        if now > minutes * 60:
            stop.touch()
            break
        for pid in family(process.pid):
            mib = anonymous_mib(pid)
            if mib is not None:
                trace = traces.setdefault(pid, Trace(role=""))
                trace.at_s.append(now)
                trace.mib.append(mib)
        time.sleep(EVERY_S)
    if process.wait(timeout=120):
        raise RuntimeError("the run failed; its output says why")
    kept = [t for t in traces.values() if t.at_s[-1] - t.at_s[0] > 0.8 * minutes * 60]
    for i, trace in enumerate(kept):
        trace.role = "launcher" if i == 0 else f"process {i}"
    return kept


def quarters(trace: Trace, of: Callable[[FloatArray], float]) -> list[float]:
    """Returns `of` applied to the readings of each quarter of the time."""
    at, mib = np.array(trace.at_s), np.array(trace.mib)
    part = np.minimum((QUARTERS * (at - at[0]) / (at[-1] - at[0])).astype(int), QUARTERS - 1)
    return [float(of(mib[part == i])) for i in range(QUARTERS)]


def growth(trace: Trace) -> float:
    """Returns the MiB by which the floor grew from the second quarter to the last.

    The floor is the least reading of a quarter of the time. Activations come and go with every
    step, about 100 MiB of them, and the C library keeps their memory until the next save gives it
    back. A quarter contains several saves, because the floor needs a reading right after one. The
    first quarter is warm-up.
    """
    floors = quarters(trace, np.min)
    return floors[-1] - floors[1]


def table(minutes: list[Trace]) -> Table:
    """Returns floors, growth and medians by process, from traces with one reading per minute."""
    names = ("1st", "2nd", "3rd", "4th")
    floors = [f"floor, {name} (MiB)" for name in names]
    typical = [f"median, {name} (MiB)" for name in names[1:]]
    rows = [[t.role, *quarters(t, np.min), growth(t), *quarters(t, np.median)[1:]] for t in minutes]
    return Table(
        name="memory",
        title="Anonymous memory of each process, by quarters of the time",
        columns=("process", *floors, "growth (MiB)", *typical),
        rows=rows,
        formats=dict.fromkeys([*floors, *typical], ".1f") | {"growth (MiB)": "+.1f"},
        note="Of the least of every minute. growth: of the floor from the second quarter to the "
        "last. The median is what a process has between saves: what it uses and what the C library "
        "keeps for it.",
    )


def by_minute(trace: Trace) -> Trace:
    """Returns the trace of the least reading of every minute."""
    minute = (np.array(trace.at_s) // 60).astype(int)
    mib, found = np.array(trace.mib), np.unique(minute)
    least = [float(mib[minute == m].min()) for m in found]
    return Trace(role=trace.role, at_s=[60.0 * m + 30 for m in found.tolist()], mib=least)


def minutes_table(minutes: list[Trace]) -> Table:
    """Returns every minute's reading, for readers who want other statistics."""
    rows = [
        [t.role, int(at // 60), x] for t in minutes for at, x in zip(t.at_s, t.mib, strict=True)
    ]
    return Table(name="minutes", title="By minute", columns=COLUMNS, rows=rows, most_rows=0)


def read_minutes(path: Path) -> list[Trace]:
    """Reads the table that `minutes_table` wrote."""
    traces: dict[str, Trace] = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            role, minute, mib = (row[name] for name in COLUMNS)
            trace = traces.setdefault(role, Trace(role=role))
            trace.at_s.append(60.0 * int(minute) + 30)
            trace.mib.append(float(mib))
    return list(traces.values())


def figure(traces: list[Trace]) -> Picture:
    drawn, (axes,) = new_figure(height=4.2)
    for i, trace in enumerate(traces):
        style = {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[i // len(COLOURS) % 5]}
        axes.plot(np.array(trace.at_s) / 60, trace.mib, label=trace.role, linewidth=1.2, **style)
    end = traces[0].at_s[-1] / 60
    axes.axvspan(0, end / QUARTERS, color="#E8E8E8", zorder=0)
    axes.set(xlabel="minutes", ylabel="anonymous memory (MiB)", xlim=(0, end))
    axes.set_ylim(bottom=0)
    drawn.legend(loc="outside right center", frameon=False, fontsize=8)
    return Picture(name="memory", caption="The least of every minute; grey: warm-up", figure=drawn)


def run(minutes: float) -> list[Trace]:
    """Trains the demo and returns the least memory of every process in every minute."""
    with tempfile.TemporaryDirectory() as place:
        stop = Path(place, "stop")
        told = SETTINGS | {"run.output_dir": place, "run.stop_file": str(stop)}
        settings = [f"{key}={value}" for key, value in told.items()]
        command = [sys.executable, "-m", "wlb", "train", "demo", "--set", *settings]
        with Path(place, "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, env=os.environ.copy())
        return [by_minute(trace) for trace in watch(process, minutes, stop)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--again", action="store_true", help="remake the page from minutes.csv")
    parser.add_argument("--quick", action="store_true", help="run four minutes and write nothing")
    options = parser.parse_args()
    here = Path(__file__).parent
    if options.again:
        minutes = read_minutes(here / "results" / "minutes.csv")
    else:
        minutes = run(4.0 if options.quick else options.minutes)
    shown = table(minutes)
    show(shown, width=190)
    if options.quick:
        return
    worst = max(minutes, key=growth)
    write_results(
        here,
        title="Memory of a long run",
        how=How.MEASURED,
        profile="the demo's 8 ranks on 2 CPU cores",
        seed=0,
        text=(
            f"The demo for {max(len(t.mib) for t in minutes)} minutes, with a checkpoint every 50 "
            f"steps and an evaluation every 100. From the second quarter of the time to the last "
            f"the floor of no process grew by more than {growth(worst):+.1f} MiB ({worst.role}). "
            f"Between saves the C library keeps more of what micro-batches of all lengths left, "
            f"the longer the run; every save gives it back."
        ),
        tables=[shown, minutes_table(minutes)],
        figures=[figure(minutes)],
    )


if __name__ == "__main__":
    main()
