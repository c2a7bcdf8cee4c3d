"""The hook that writes snapshots of CUDA's caching allocator (`telemetry.snapshot_steps`).

A snapshot lists every block of a rank's GPU memory, with the call stack that allocated the block.
The page https://docs.pytorch.org/memory_viz shows snapshots. This hook has not run on a GPU yet.
"""

import sys
from pathlib import Path

import torch

from wlb.train.hooks import ExecutedStep, Hook, RunContext
from wlb.train.telemetry.wall import Phase

FOLDER = "memory"
MOST_EVENTS = 100_000
"""Number of allocations and frees that a rank remembers, the latest ones.

Each of them takes about 1 KiB of host memory, so they take about 100 MiB together."""
_ATTACH = "_cuda_attach_out_of_memory_observer"


class SnapshotMemory(Hook):
    """Writes snapshots of this rank's GPU memory.

    A snapshot is written after each step that `telemetry.snapshot_steps` lists, and also when an
    allocation fails. The key counts steps by updates of the weights, as the printed table does.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.folder, self.rank = directory / FOLDER, rank

    def begin(self, run: RunContext) -> None:
        """Let torch record allocations, and call `_out_of_memory` when an allocation fails."""
        torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
        # torch calls `_out_of_memory` while the tensors of the failing step still exist, so the
        # snapshot includes them. getattr is used because torch's type stubs lack this name.
        attach = getattr(torch._C, _ATTACH)
        attach(self._out_of_memory)

    def record(self, run: RunContext, step: ExecutedStep) -> None:
        """Write a snapshot if one is due after this step."""
        if step.updated and run.steps_done in run.spec.telemetry.snapshot_steps:
            # Writing a snapshot may take longer than a step, so do not count it as time of steps.
            with run.wall.phase(Phase.REST):
                run.report.say(self._write(f"step-{run.steps_done:08d}"))

    def close(self) -> None:
        """Stop recording allocations."""
        torch.cuda.memory._record_memory_history(enabled=None)

    def _out_of_memory(self, device: int, asked: int, allocated: int, free: int) -> None:
        """Report a failed allocation of `asked` bytes, and write a snapshot. torch calls this."""
        sys.stderr.write(
            f"wlb train: out of memory: rank {self.rank} tried to allocate {asked:,} "
            f"bytes, but its GPU has {free:,} bytes free; {self._write('oom')}\n"
        )

    def _write(self, moment: str) -> str:
        """Write a snapshot. Return a line that says where it is, or why it could not be written.

        The name of the snapshot's file begins with `moment`.
        """
        path = self.folder / f"{moment}-rank-{self.rank}.pickle"
        try:
            # Do not use `parents=True`, which would create the run's folder anew if it was removed.
            self.folder.mkdir(exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        # Raising here would hide the failure that the snapshot should explain.
        except OSError as error:
            return f"the memory snapshot {path} could not be written: {error}"
        return f"memory snapshot: {path} (https://docs.pytorch.org/memory_viz)"
