"""The hook that writes snapshots of CUDA's allocator: `telemetry.snapshot_steps`.

A snapshot holds every block of a rank's GPU memory and the calls that allocated it, for
https://docs.pytorch.org/memory_viz. It has not run on a GPU.
"""

import sys
from pathlib import Path

import torch

from wlb.train.hooks import ExecutedStep, Hook, RunContext
from wlb.train.telemetry.wall import Phase

FOLDER = "memory"
MOST_EVENTS = 100_000
"""Allocations and frees that a rank remembers, about 1 KiB each."""
_ATTACH = "_cuda_attach_out_of_memory_observer"


class SnapshotMemory(Hook):
    """Writes a snapshot of this rank after each step of `telemetry.snapshot_steps`, as the table of
    steps counts them, and where an allocation fails.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.folder, self.rank = directory / FOLDER, rank

    def begin(self, run: RunContext) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
        # It is called while the tensors of the failing step are still there.
        attach = getattr(torch._C, _ATTACH)  # a name that torch's stubs lack
        attach(self._out_of_memory)

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        if step.updated and run.steps_done in run.spec.telemetry.snapshot_steps:
            # Writing a snapshot may take longer than its step, and is no part of it.
            with run.wall.phase(Phase.REST):
                run.report.say(self._write(f"step-{run.steps_done:08d}"))

    def close(self) -> None:
        torch.cuda.memory._record_memory_history(enabled=None)

    def _out_of_memory(self, device: int, asked: int, allocated: int, free: int) -> None:
        sys.stderr.write(
            f"wlb train: rank {self.rank} needs {asked:,} bytes, its GPU has {free:,} free; "
            f"{self._write('oom')}\n"
        )

    def _write(self, moment: str) -> str:
        """Write a snapshot; a line that says where it is, or why it is not there."""
        path = self.folder / f"{moment}-rank-{self.rank}.pickle"
        try:
            # Without parents=True, so that a run's folder that was removed is not made again.
            self.folder.mkdir(exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        # A failure here would hide the one that the snapshot is of.
        except OSError as error:
            return f"the memory snapshot {path} could not be written: {error}"
        return f"memory snapshot: {path} (https://docs.pytorch.org/memory_viz)"
