"""Simulate the steps that a finished run trained, and compare them with its measured times.

The run's `metrics.jsonl` contains its configuration and the measured step times since its most
recent start. The planner plans the steps again from the same token store. If the plans differ from
those that were trained (because of another store, code version or kernel profile), an error is
raised. The steps can also be simulated with another kernel profile, to test its calibration.
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

    spec: RunSpec  # the run's configuration
    left_out: int  # how many steps at the beginning are not compared
    measured: tuple[MeasuredStep, ...]  # the compared steps, as measured
    # The same steps, as simulated. Each simulation has consecutive steps.
    simulations: tuple[Simulation, ...]
    # Most bytes of GPU memory that torch had allocated on rank 0 since the run's most recent start.
    # None on a CPU, where only the memory of the whole process is known.
    peak_bytes: int | None = None
    remark: str = ""  # why the last steps are not compared; "" if all are compared

    @property
    def profile(self) -> KernelProfile:
        """Return the kernel profile with which steps were simulated."""
        return self.simulations[0].simulator.cost.profile

    @property
    def measured_s(self) -> FloatArray:
        """Return the measured step times in seconds, shape [steps]."""
        return np.array([m.step_time_s for m in self.measured], np.float64)

    @property
    def simulated_s(self) -> FloatArray:
        """Return the simulated step times in seconds, shape [steps]."""
        return np.concatenate([s.step_time_s for s in self.simulations])

    @property
    def tokens_per_s(self) -> float:
        """Return the measured tokens per second of all ranks together in the compared steps."""
        return sum(m.num_tokens for m in self.measured) / float(self.measured_s.sum())

    @property
    def estimated_bytes(self) -> int:
        """Return the estimated peak memory of pipeline rank 0 in the compared steps, in bytes."""
        return max(int(s.peak_memory_bytes[:, 0].max()) for s in self.simulations)

    @property
    def mape(self) -> float:
        """Return the mean over compared steps of |simulated - measured| / measured step time."""
        return float(np.mean(np.abs(self.simulated_s / self.measured_s - 1)))

    @property
    def ratio(self) -> float:
        """Return the simulated time of all compared steps divided by their measured time."""
        return float(self.simulated_s.sum() / self.measured_s.sum())

    @property
    def correlation(self) -> float:
        """Return Pearson's correlation of measured and simulated step times."""
        return float(np.corrcoef(self.measured_s, self.simulated_s)[0, 1])


def simulate_recorded(
    folder: Path, *, profile: str = "", skip: int | None = None, console: Console | None = None
) -> RecordedRun:
    """Simulate the steps of a finished run on the kind of device on which it ran.

    A run on GPUs can be simulated on a machine without GPUs.

    Args:
        folder: The run's folder, run.output_dir/run.name.
        profile: Name or path of a kernel profile; "" means the profile of the run.
        skip: Number of steps at the beginning that are not compared; None means the run's
            telemetry.warmup_steps.
        console: Where progress is printed; None means nowhere.
    """
    records = read_run(folder)
    spec, written = records.spec, str(folder / "metrics.jsonl")
    left_out = spec.telemetry.warmup_steps if skip is None else skip
    since_start = [s.measured for s in records.steps if s.step in records.since_start]
    metrics = [measured for measured in since_start if measured.num_targets][left_out:]
    if not metrics:
        raise UserError(
            f"{written} has no step left to compare after the first {left_out} steps, which are "
            "skipped; lower telemetry.warmup_steps (or the argument skip), or train longer"
        )
    remark, first = "", records.learned_from
    if first is not None:
        remark = learned_remark(first)
        metrics = [measured for measured in metrics if measured.step < first.step]
    if not metrics:
        raise UserError(f"{written} has no step to compare: {remark}")
    stores = open_stores(spec, console or Console(quiet=True))
    spec = ready(spec, stores, spec.parallel.world_size)
    device = records.starts[-1].get("device") if records.starts else None
    if device is None:
        # An older version of wlb, which did not record the device, trained the run.
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
