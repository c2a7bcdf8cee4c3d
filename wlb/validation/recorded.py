"""Simulate the steps that a finished run trained, and compare them with its measured times.

The last checkpoint has the configuration and `metrics.jsonl` the times. The planner runs again on
the same store; plans that differ from the trained ones (another store, code or kernel profile) are
refused. Steps can be priced with another kernel profile, which is how a calibration is tested.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from wlb.cost import KernelProfile, repriced, workload_for
from wlb.parallel.world import choose_device
from wlb.plan import AS_PROFILED, FloatArray, MeasuredStep, UserError
from wlb.planner import open_planner
from wlb.report.run.records import read_run
from wlb.report.run.simulated import planned_again
from wlb.simulate import Simulation, Simulator
from wlb.simulate.step import chunked
from wlb.spec import RunSpec, apply
from wlb.train.checkpoint import folder as checkpoint
from wlb.train.refuse import with_backend
from wlb.train.stores import open_stores, ready


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedRun:
    """Measured and simulated steps of a run. simulations: of consecutive steps. left_out: number of
    steps before them."""

    spec: RunSpec
    left_out: int
    measured: tuple[MeasuredStep, ...]
    simulations: tuple[Simulation, ...]

    @property
    def profile(self) -> KernelProfile:
        """Kernel profile of the simulation."""
        return self.simulations[0].simulator.cost.profile

    @property
    def measured_s(self) -> FloatArray:
        """Measured step times, shape [steps]."""
        return np.array([m.step_time_s for m in self.measured], np.float64)

    @property
    def simulated_s(self) -> FloatArray:
        return np.concatenate([s.step_time_s for s in self.simulations])

    @property
    def mape(self) -> float:
        """Mean of |simulated - measured| / measured."""
        return float(np.mean(np.abs(self.simulated_s / self.measured_s - 1)))

    @property
    def ratio(self) -> float:
        """Total simulated time over total measured time."""
        return float(self.simulated_s.sum() / self.measured_s.sum())

    @property
    def correlation(self) -> float:
        """Pearson's correlation over steps."""
        return float(np.corrcoef(self.measured_s, self.simulated_s)[0, 1])


def simulate_recorded(
    folder: Path, *, profile: str = "", skip: int | None = None, console: Console | None = None
) -> RecordedRun:
    """Simulate the run in `folder` (run.output_dir/run.name), on the device that it would use here.

    profile: name or path of a kernel profile; "" = the run's own. skip: first steps that are left
    out; None = telemetry.warmup_steps.
    """
    written = folder / "metrics.jsonl"
    metrics = _metrics(written)
    spec = _spec(folder)
    left_out = spec.telemetry.warmup_steps if skip is None else skip
    metrics = metrics[left_out:]
    if not metrics:
        raise UserError(f"{written} has no step after the first {left_out}")
    stores = open_stores(spec, console or Console(quiet=True))
    device = choose_device(spec.run.device, local_ranks=spec.parallel.world_size).kind
    spec = with_backend(ready(spec, stores, spec.parallel.world_size), device)
    spec = replace(spec, planner=replace(spec.planner, baseline=False))
    planner = open_planner(spec, stores.train, device)
    priced = replace(spec, cost=replace(spec.cost, profile=profile)) if profile else spec
    simulator = Simulator(spec=priced, cost=workload_for(priced, device))
    wanted = {m.step: m for m in metrics}
    learned = read_run(folder).prices
    steps = planned_again(
        planner, wanted, dp=spec.parallel.dp, written=str(written), prices=learned
    )
    simulations: list[Simulation] = []
    for prices, group in groupby(steps, lambda step: step.plan.prices):
        if not profile and prices != AS_PROFILED:
            cost = repriced(workload_for(spec, device), prices, device=device)
            simulator = Simulator(spec=spec, cost=cost)
        simulations += [simulator.run(simulator.price(chunk)) for chunk in chunked(group)]
    return RecordedRun(
        spec=spec, left_out=left_out, measured=tuple(metrics), simulations=tuple(simulations)
    )


def _spec(folder: Path) -> RunSpec:
    saved = checkpoint.list_complete(folder / "checkpoints")
    if not saved:
        raise UserError(
            f"{folder} has no checkpoint with the run's configuration; give the folder of a run "
            f"that was saved (run.output_dir/run.name)"
        )
    path = saved[-1] / "run.json"
    data = json.loads(path.read_text("utf-8"))
    return apply(RunSpec(), data["spec"], source=str(path), is_stored=True)


def _metrics(path: Path) -> list[MeasuredStep]:
    """Return measured steps in order since the last start of the run, whose configuration the last
    checkpoint has."""
    if not path.exists():
        raise UserError(f"{path} does not exist; give the folder of a run that trained")
    lines = list(_lines(path))
    starts = [i for i, line in enumerate(lines) if line["kind"] == "start"]
    last = lines[max(starts, default=0) :]
    found = [MeasuredStep.from_json(x["measured"]) for x in last if x["kind"] == "step"]
    return [m for m in found if m.num_targets]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text("utf-8", errors="replace").splitlines():
        with suppress(ValueError):  # an incomplete line of a run that was killed
            yield json.loads(text)
