"""Simulate the steps that a finished run trained, and compare them with its measured times.

`metrics.jsonl` has the configuration and the times since the last start. The planner runs again on
the same store; plans that differ from the trained ones (another store, code or kernel profile) are
refused. Steps can be priced with another kernel profile, which is how a calibration is tested.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from wlb.cost import KernelProfile
from wlb.parallel.world import choose_device
from wlb.plan import FloatArray, MeasuredStep, UserError
from wlb.report.run.records import read_run
from wlb.report.run.simulated import learned_remark, simulate_again
from wlb.simulate import Simulation
from wlb.spec import AttentionBackend, RunSpec
from wlb.train.refuse import with_backend
from wlb.train.stores import open_stores, ready


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedRun:
    """Measured and simulated steps of a run."""

    spec: RunSpec
    left_out: int  # steps before them
    measured: tuple[MeasuredStep, ...]
    simulations: tuple[Simulation, ...]  # of consecutive steps
    peak_bytes: int | None = None
    """Most that rank 0's GPU held for torch since the run began; None of a CPU, whose processes
    hold more than tensors."""
    remark: str = ""  # on steps after them, "" if there are none

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
    def tokens_per_s(self) -> float:
        """Measured, over all steps."""
        return sum(m.num_tokens for m in self.measured) / float(self.measured_s.sum())

    @property
    def estimated_bytes(self) -> int:
        """What pipeline rank 0 needs at most in these steps, as `wlb.cost` estimates it."""
        return max(int(s.peak_memory_bytes[:, 0].max()) for s in self.simulations)

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
    """Simulate the run in `folder` (run.output_dir/run.name), on the kind of device that it had, so
    that runs of a GPU are simulated on any machine.

    profile: name or path of a kernel profile; "" = the run's own. skip: first steps that are left
    out; None = telemetry.warmup_steps.
    """
    records = read_run(folder)
    spec, written = records.spec, str(folder / "metrics.jsonl")
    left_out = spec.telemetry.warmup_steps if skip is None else skip
    since_start = [s.measured for s in records.steps if s.step in records.since_start]
    metrics = [measured for measured in since_start if measured.num_targets][left_out:]
    if not metrics:
        raise UserError(f"{written} has no step after the first {left_out}")
    remark, first = "", records.learned_from
    if first is not None:
        remark = learned_remark(first)
        metrics = [measured for measured in metrics if measured.step < first.step]
    if not metrics:
        raise UserError(f"{written}: {remark}")
    stores = open_stores(spec, console or Console(quiet=True))
    spec = ready(spec, stores, spec.parallel.world_size)
    device = records.starts[-1].get("device") if records.starts else None
    if device is None:
        # Written by a version that did not say it.
        device = choose_device(spec.run.device, local_ranks=spec.parallel.world_size).kind
    if spec.kernels.attention == AttentionBackend.AUTO:
        spec = with_backend(spec, device)
    trained = {m.step: m for m in metrics}
    simulations = simulate_again(
        spec, stores.train, device, trained, profile=profile, written=written
    )
    return RecordedRun(
        spec=spec,
        left_out=left_out,
        measured=tuple(metrics),
        simulations=tuple(simulations),
        peak_bytes=records.steps[-1].memory_bytes if device == "cuda" else None,
        remark=remark,
    )
