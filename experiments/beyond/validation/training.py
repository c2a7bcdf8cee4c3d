"""Compares real training runs on a CPU with simulations by a profile calibrated on another run.

There is one calibrated profile for each number of processes, because two busy cores share caches
and memory. Every other run is planned and simulated with it and compared step by step. Steps during
which other programs used the cores are marked as disturbed (`others.py`).
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.beyond.validation.others import watch
from experiments.beyond.validation.record import Conditions, conditions, load_now
from experiments.harness.drawing import LINES, new_figure
from experiments.harness.pages import ROOT, Picture, Table
from wlb.validation.recorded import RecordedRun, simulate_recorded

LIMIT = 0.15
"""Mean relative error of a run's steps that is aimed at."""
CONFIGURATION = Path(__file__).with_name("run.toml")
FOLDER = ROOT / "runs" / "validation"
WARM_UP = 3
DISTURBED = 0.05
"""Share of a core, used by other programs, above which a step counts as disturbed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run."""

    name: str
    processes: int
    differs: str  # how it differs from the run that its profile is calibrated on
    overrides: tuple[str, ...]
    calibrates: bool = False  # whether the profile of its number of processes is calibrated on it


def _run(name: str, processes: int, differs: str, *overrides: str, calibrates: bool = False) -> Run:
    return Run(
        name=name, processes=processes, differs=differs, overrides=overrides, calibrates=calibrates
    )


PLAIN = ("packing.policy=original", "run.seed=1")
SHORT = ("data.context_window=1536", "data.num_windows=4")
WIDER = (
    "model.hidden_size=384",
    "model.num_layers=6",
    "model.num_heads=6",
    "model.num_kv_heads=6",
    "model.ffn_hidden_size=1024",
)
RUNS = (
    _run("one", 1, "calibration: Algorithm 1, window 3,072", calibrates=True),
    _run("plain", 1, "Plain-4D, other documents", *PLAIN),
    _run("short", 1, "bounded, 4 windows of 1,536", "packing.policy=bounded", *SHORT),
    _run(
        "long",
        1,
        "fixed greedy, 1 window of 6,144, other documents",
        "packing.policy=fixed",
        "run.seed=2",
        "data.context_window=6144",
        "data.num_windows=1",
    ),
    _run(
        "wider",
        1,
        "model of 3.4 times the layers' parameters, window 1,536",
        *WIDER,
        "data.context_window=1536",
        *PLAIN,
    ),
    _run("two", 2, "calibration: CP 2, Algorithm 1", "parallel.cp=2", calibrates=True),
    _run(
        "cp_document",
        2,
        "Plain-4D, per-document sharding, other documents",
        "parallel.cp=2",
        "sharding.strategy=per_document",
        *PLAIN,
    ),
    _run(
        "cp_wider",
        2,
        "balanced sharding, wider model, window 1,536",
        "parallel.cp=2",
        "sharding.strategy=balanced",
        *WIDER,
        "data.context_window=1536",
    ),
    _run(
        "dp", 2, "DP 2, Plain-4D, 4 windows of 3,072", "parallel.dp=2", *PLAIN, "data.num_windows=4"
    ),
    _run("tp", 2, "TP 2, Plain-4D", "parallel.tp=2", *PLAIN),
    _run(
        "pp_1f1b",
        2,
        "PP 2 1F1B, Plain-4D, 4 windows of 1,536",
        "parallel.pp=2",
        "pp.schedule=1f1b",
        *PLAIN,
        *SHORT,
    ),
    _run(
        "pp_interleaved",
        2,
        "PP 2 interleaved, 2 stages a rank, 4 windows of 1,536",
        "parallel.pp=2",
        "pp.virtual_stages=2",
        *SHORT,
    ),
    _run(
        "pp_zero_bubble",
        2,
        "PP 2 zero-bubble, 2 stages a rank, bounded, 4 windows of 1,536",
        "parallel.pp=2",
        "pp.schedule=interleaved_zero_bubble",
        "pp.virtual_stages=2",
        "packing.policy=bounded",
        *SHORT,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Measured and simulated times of a run's steps after warm-up."""

    run: Run
    others: list[float]  # cores that other programs used in each step; empty if unknown
    measured_s: list[float]  # measured time of each step
    simulated_s: list[float]  # time of each step, simulated with the calibrated profile
    before_s: list[float]  # time of each step, simulated with the shipped profile
    computing_s: float  # CPU time that a rank spends in the passes of a step, mean over ranks
    simulated_computing_s: float  # the simulated value of `computing_s`

    @property
    def undisturbed(self) -> NDArray[np.bool_]:
        """Returns a mask of the steps without other programs; if unknown, of all steps."""
        if not self.others:
            return np.ones(len(self.measured_s), np.bool_)
        return np.array(self.others) <= DISTURBED

    @property
    def mape(self) -> float | None:
        """Returns the mean absolute relative error of undisturbed steps; None if there are none."""
        return self._mape(self.undisturbed)

    @property
    def mape_of_all(self) -> float | None:
        """Returns the mean absolute relative error of all steps."""
        return self._mape(np.ones(len(self.measured_s), np.bool_))

    def _mape(self, chosen: NDArray[np.bool_]) -> float | None:
        measured, simulated = (x[chosen] for x in self.arrays())
        return float(np.mean(np.abs(simulated / measured - 1))) if measured.size else None

    @property
    def correlation(self) -> float | None:
        """Returns the correlation of measured and simulated times of undisturbed steps."""
        measured, simulated = (x[self.undisturbed] for x in self.arrays())
        return float(np.corrcoef(measured, simulated)[0, 1]) if measured.size > 2 else None

    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return np.array(self.measured_s), np.array(self.simulated_s)

    def mean(self, values: Sequence[float]) -> float:
        """Returns the mean over undisturbed steps, or over all if there are none."""
        chosen = self.undisturbed if self.undisturbed.any() else slice(None)
        return float(np.array(values)[chosen].mean())


def measure(runs: Sequence[Run], *, steps: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Trains the runs and returns the results as JSON values.

    Args:
        runs: Runs in order. A run comes after the run that its profile is calibrated on.
        steps: Steps of each run, including warm-up.
        say: Gets a line about each run.
    """
    before = load_now()
    shutil.rmtree(FOLDER, ignore_errors=True)
    found: list[Trained] = []
    for run in runs:
        found.append(_compared(run, _train(run, steps)))
        t = found[-1]
        say(
            f"{run.name}: {t.mean(t.measured_s):.3f} s measured, {t.mean(t.simulated_s):.3f} "
            f"simulated; MAPE {_percent(t.mape)} of {t.undisturbed.sum()} undisturbed steps, "
            f"{_percent(t.mape_of_all)} of all {len(t.measured_s)}"
        )
    return {
        "conditions": asdict(conditions(before)),
        "steps": steps,
        "runs": [asdict(t) for t in found],
    }


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _profile(run: Run) -> Path:
    return FOLDER / f"calibrated-{run.processes}.json"


def _train(run: Run, steps: int) -> list[float]:
    """Trains a run and returns the cores that other programs used in each step after warm-up.

    Each rank has one thread. So there are no more threads than cores, and the CPU time of a thread
    is the work of its rank.
    """
    command = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "wlb", "train", str(CONFIGURATION)]
    command += ["--set", f"run.name={run.name}", f"training.steps={steps}", *run.overrides]
    command += [f"telemetry.warmup_steps={WARM_UP}", "checkpoint.keep=1"]
    if run.calibrates:
        command += ["cost.profile=cpu", "--calibrate", str(_profile(run))]
    else:
        command += [f"cost.profile={_profile(run)}"]
    log = FOLDER / f"{run.name}.log"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        training = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        others = watch(training, FOLDER / run.name / "metrics.jsonl")
    if training.returncode:
        raise SystemExit(f"{run.name} failed:\n{log.read_text('utf-8')[-3000:]}")
    return others[WARM_UP - 1 :]


def _compared(run: Run, others: list[float]) -> Trained:
    folder = FOLDER / run.name
    made = simulate_recorded(folder, profile=str(_profile(run)))
    return Trained(
        run=run,
        others=others,
        measured_s=made.measured_s.tolist(),
        simulated_s=made.simulated_s.tolist(),
        before_s=simulate_recorded(folder, profile="cpu").simulated_s.tolist(),
        computing_s=_computing_s(made),
        simulated_computing_s=_simulated_computing_s(made),
    )


def _computing_s(made: RecordedRun) -> float:
    records = [m.telemetry for m in made.measured if m.telemetry is not None]
    return float(np.mean([r.compute.mean_s for r in records]))


def _simulated_computing_s(made: RecordedRun) -> float:
    """Returns the simulated computing time of a rank in a step, without collectives."""
    return float(
        np.concatenate([s.compute_s.mean(axis=(1, 2, 3)) for s in made.simulations]).mean()
    )


def parse(record: dict[str, Any]) -> tuple[Conditions, list[Trained]]:
    found = [
        Trained(**{**r, "run": Run(**{**r["run"], "overrides": tuple(r["run"]["overrides"])})})
        for r in record["runs"]
    ]
    return Conditions.parse(record["conditions"]), found


def table(found: Sequence[Trained]) -> Table:
    records: list[dict[str, Any]] = []
    for t in found:
        mean = t.mean(t.measured_s)
        records.append(
            {
                "run": t.run.name,
                "processes": t.run.processes,
                "differs from the calibrated run in": t.run.differs,
                "steps": int(t.undisturbed.sum()),
                "measured s": mean,
                "simulated s": t.mean(t.simulated_s),
                "ratio": t.mean(t.simulated_s) / mean,
                "ratio before": t.mean(t.before_s) / mean,
                "MAPE %": None if t.mape is None else 100 * t.mape,
                "of all steps": None if t.mape_of_all is None else 100 * t.mape_of_all,
                "correlation": t.correlation,
                "computing s": t.computing_s,
                "simulated computing s": t.simulated_computing_s,
            }
        )
    others = [t.mape for t in found if not t.run.calibrates and t.mape is not None]
    return Table.of(
        "training",
        "Training steps, measured and simulated",
        records,
        formats={
            **dict.fromkeys(("measured s", "simulated s", "ratio", "ratio before"), ".3f"),
            **dict.fromkeys(("computing s", "simulated computing s"), ".3f"),
            **dict.fromkeys(("MAPE %", "of all steps"), ".1f"),
            "correlation": ".3f",
        },
        note=(
            f"MAPE of the {len(others)} runs that were not calibrated on: largest "
            f"{max(others, default=0.0):.1%}, mean {sum(others) / max(1, len(others)):.1%}, at "
            f"most {LIMIT:.0%} in {sum(m <= LIMIT for m in others)}. Steps: those in which other "
            f"programs used at most {DISTURBED:.0%} of a core; all columns but `of all steps` and "
            f"computing are of them. Ratio: simulated over measured; before: with the shipped "
            f"`cpu` profile. Computing: a rank's CPU time in passes, without collectives, a step."
        ),
    )


def text(at: Conditions, found: Sequence[Trained]) -> str:
    steps = len(found[0].measured_s)
    return f"""### Training
`wlb train` on the standard library's sources (`run.toml`: 4 layers of width 256, 5.5M parameters,
float32, Gloo, one thread a rank, as many ranks as cores at most), {steps} steps a run after
{WARM_UP} of warm-up that are left out. Two runs calibrate the shipped `cpu` profile
(`wlb train --calibrate`): one of one process, one of two. What they fit: attention and linear
layers, forward and backward, and output head with loss; by CPU time, so that waiting for a core
does not count. Collectives, messages, optimiser and embedding keep the shipped profile's prices.
Every other run is planned with that profile, differs as the table says, and each of its steps is
simulated from the same plan (`wlb.validation.recorded`). {at.words()}"""


def picture(found: Sequence[Trained]) -> Picture:
    ncols = 3
    nrows = -(-len(found) // ncols)
    figure, axes = new_figure(nrows=nrows, ncols=ncols, height=1.9 * nrows)
    for axis, t in zip(axes, found, strict=False):
        measured, simulated = t.arrays()
        x = np.arange(len(measured)) + WARM_UP
        axis.plot(x, measured, linestyle=LINES[0], label="measured")
        axis.plot(x, simulated, linestyle=LINES[1], label="simulated")
        disturbed = ~t.undisturbed
        axis.plot(x[disturbed], measured[disturbed], "x", color="black", label="disturbed")
        axis.set_ylim(0, 1.25 * max(measured.max(), simulated.max()))
        axis.set_title(
            f"{t.run.name}, {'calibration' if t.run.calibrates else f'MAPE {_percent(t.mape)}'}",
            fontsize=10,
        )
    for axis in axes[len(found) :]:
        axis.set_axis_off()
    axes[0].legend(loc="lower left", fontsize=8)
    figure.supxlabel("step")
    figure.supylabel("seconds")
    return Picture(
        name="training",
        caption="Each step's time, measured and simulated; crosses: others used the cores.",
        figure=figure,
    )
