"""Does a run grow? `python -m experiments.memory_growth [--minutes 60]`.

The demo trains over and over its corpus, with checkpoints and evaluations, until a stop file ends
it; the anonymous memory of each of its processes is read every few seconds. Growth is the slope of
a line through what comes after the warm-up, with its 95% interval from blocks of samples.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from experiments.drawing import COLOURS, LINES, new_figure
from experiments.results import How, Picture, Table, show, write_results

EVERY_S = 5.0
WARM_UP = 0.25
"""Share of the time that is left out: buffers grow to the longest micro-batch that comes."""
BLOCKS = 12
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
    """Of one process: seconds since the start, anonymous resident MiB."""

    role: str
    at_s: list[float] = field(default_factory=list[float])
    mib: list[float] = field(default_factory=list[float])


def family(pid: int) -> list[int]:
    """A process and its descendants, in the order in which they began."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                continue  # it ended meanwhile
    return found


def anonymous_mib(pid: int) -> float | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    kib = [int(line.split()[1]) for line in lines if line.startswith("RssAnon")]
    return kib[0] / 1024 if kib else None


def watch(process: subprocess.Popen[bytes], minutes: float, stop: Path) -> list[Trace]:
    """Traces of all processes that lived through most of it."""
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


def slope(trace: Trace) -> tuple[float, float, float]:
    """MiB an hour after the warm-up, and its 95% interval by jackknife over blocks of time."""
    at, mib = np.array(trace.at_s) / 3600, np.array(trace.mib)
    late = at > WARM_UP * at[-1]
    at, mib = at[late], mib[late]
    whole = float(np.polyfit(at, mib, 1)[0])
    parts = np.array_split(np.arange(at.size), BLOCKS)
    without = [float(np.polyfit(np.delete(at, p), np.delete(mib, p), 1)[0]) for p in parts]
    error = float(np.sqrt((BLOCKS - 1) * np.var(without)))
    return whole, whole - 2.2 * error, whole + 2.2 * error


def table(traces: list[Trace]) -> Table:
    rows: list[list[object]] = []
    for trace in traces:
        mib = np.array(trace.mib)
        at = np.array(trace.at_s)
        late = mib[at > WARM_UP * at[-1]]
        middle = len(late) // 2
        change = late[middle:].mean() - late[:middle].mean()
        rows.append([trace.role, late[0], late[-1], late.max(), change, *slope(trace)])
    return Table(
        name="memory",
        title="Anonymous memory of each process",
        columns=(
            "process",
            "after warm-up (MiB)",
            "at the end (MiB)",
            "largest (MiB)",
            "second half less first (MiB)",
            "slope (MiB/h)",
            "from",
            "to",
        ),
        rows=rows,
        formats=dict.fromkeys(("after warm-up (MiB)", "at the end (MiB)", "largest (MiB)"), ".1f")
        | dict.fromkeys(("second half less first (MiB)", "slope (MiB/h)", "from", "to"), "+.2f"),
    )


def figure(traces: list[Trace]) -> Picture:
    drawn, (axes,) = new_figure(height=4.2)
    for i, trace in enumerate(traces):
        style = {"color": COLOURS[i % len(COLOURS)], "linestyle": LINES[i // len(COLOURS) % 5]}
        axes.plot(np.array(trace.at_s) / 60, trace.mib, label=trace.role, linewidth=1.2, **style)
    end = traces[0].at_s[-1] / 60
    axes.axvspan(0, WARM_UP * end, color="#E8E8E8", zorder=0)
    axes.set(xlabel="minutes", ylabel="anonymous memory (MiB)", xlim=(0, end))
    axes.set_ylim(bottom=0)
    drawn.legend(loc="outside right center", frameon=False, fontsize=8)
    return Picture(name="memory", caption="Memory of each process; grey: warm-up", figure=drawn)


def num_steps(metrics: Path) -> int:
    return sum('"kind": "step"' in line for line in metrics.read_text("utf-8").splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--quick", action="store_true", help="two minutes; writes nothing")
    options = parser.parse_args()
    minutes = 2.0 if options.quick else options.minutes
    with tempfile.TemporaryDirectory() as place:
        stop = Path(place, "stop")
        told = SETTINGS | {"run.output_dir": place, "run.stop_file": str(stop)}
        settings = [f"{key}={value}" for key, value in told.items()]
        command = [sys.executable, "-m", "wlb", "train", "demo", "--set", *settings]
        with Path(place, "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, env=os.environ.copy())
        traces = watch(process, minutes, stop)
        steps = num_steps(Path(place, "demo", "metrics.jsonl"))
    shown = table(traces)
    show(shown, width=150)
    if options.quick:
        return
    worst = max(traces, key=lambda trace: slope(trace)[0])
    value, low, high = slope(worst)
    write_results(
        Path(__file__).parent,
        title="Memory of a long run",
        how=How.MEASURED,
        profile="the demo's 8 ranks on 2 CPU cores",
        seed=0,
        text=(
            f"The demo, {minutes:.0f} minutes and {steps:,} steps, with a checkpoint every 50 and "
            f"an evaluation every 100. After the first quarter of the time the steepest of "
            f"{len(traces)} processes ({worst.role}) changes by {value:+.2f} MiB an hour (95%: "
            f"{low:+.2f} to {high:+.2f})."
        ),
        tables=[shown],
        figures=[figure(traces)],
    )


if __name__ == "__main__":
    main()
