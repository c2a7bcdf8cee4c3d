"""Simulate the steps that a finished run trained, and compare them with its measured times.

`metrics.jsonl` of the run has its configuration and its step times since the last start. The
planner runs once more on the same store. If its plans differ from the trained ones (because of
another store, code version or kernel profile), the comparison is refused. Another kernel profile
can price the steps, which tests how well that profile is calibrated.
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
    left_out: int  # number of first steps that are not compared
    measured: tuple[MeasuredStep, ...]
    simulations: tuple[Simulation, ...]  # each of consecutive steps
    # Peak of torch's allocated GPU memory on rank 0 since the run began. None on a CPU, where the
    # memory of a process is more than its tensors.
    peak_bytes: int | None = None
    remark: str = ""  # why steps after the compared ones are left out; "" if none are

    @property
    def profile(self) -> KernelProfile:
        """Return the kernel profile of the simulation."""
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
        """Return the measured throughput over all steps."""
        return sum(m.num_tokens for m in self.measured) / float(self.measured_s.sum())

    @property
    def estimated_bytes(self) -> int:
        """Return the estimated peak memory of pipeline rank 0 in these steps."""
        return max(int(s.peak_memory_bytes[:, 0].max()) for s in self.simulations)

    @property
    def mape(self) -> float:
        """Return the mean of |simulated - measured| / measured."""
        return float(np.mean(np.abs(self.simulated_s / self.measured_s - 1)))

    @property
    def ratio(self) -> float:
        """Return the total simulated time over the total measured time."""
        return float(self.simulated_s.sum() / self.measured_s.sum())

    @property
    def correlation(self) -> float:
        """Return Pearson's correlation of measured and simulated step times."""
        return float(np.corrcoef(self.measured_s, self.simulated_s)[0, 1])


def simulate_recorded(
    folder: Path, *, profile: str = "", skip: int | None = None, console: Console | None = None
) -> RecordedRun:
    """Simulate a recorded run on the kind of device that it had.

    This machine needs no such device, so a run on GPUs can be simulated anywhere.

    Args:
        folder: The run's folder, run.output_dir/run.name.
        profile: Name or path of a kernel profile; "" means the run's.
        skip: Number of first steps to leave out; None means telemetry.warmup_steps.
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
            "skipped; skip fewer steps, or train longer"
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
        # The run is from a version that did not record its device.
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
