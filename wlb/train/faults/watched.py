"""Run a rank's training with its own log, watched by the other ranks (`wlb.launch.watch`)."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from wlb.launch.failure import FailureReport
from wlb.launch.local import is_launched, report_failure
from wlb.launch.position import Position
from wlb.launch.watch import Watch, WatchOptions
from wlb.parallel.mesh import Mesh
from wlb.parallel.world import World
from wlb.spec import RunSpec
from wlb.train.faults.full import full_disk
from wlb.train.telemetry.appended import AppendedFile

LOGS = "logs"
FAILURE = "failure.txt"


@contextlib.contextmanager
def watched(
    directory: Path, spec: RunSpec, *, world: World, mesh: Mesh, position: Position
) -> Iterator[None]:
    """One rank's part of the run in `directory`; all ranks enter it together.

    An exception ends all ranks with one report; a rank without a watch (a single one, or with
    training.heartbeat_s = 0) just raises.
    """
    c = mesh.at
    place = (
        f"tp {c.tp}, cp {c.cp}, pp {c.pp}, dp {c.dp}; process {os.getpid()} on "
        f"{socket.gethostname()}, {mesh.device}"
    )
    logs, is_alone = directory / LOGS, world.world_size == 1
    watch = None
    with contextlib.nullcontext() if is_alone else rank_log(logs, world.rank, place):
        if spec.training.heartbeat_s and not is_alone:
            options = WatchOptions(
                silence_s=spec.training.heartbeat_s,
                stuck_s=spec.training.timeout_s,
                logs=logs,
                place=place,
            )
            watch = Watch(world, position, options, lambda report: _end(report, directory))
        try:
            yield
        except Exception as raised:
            error = full_disk(raised) or raised
            if watch is not None:
                watch.raised(error)
            error.add_note(f"in {position.now().describe()}")
            if error is raised:
                raise
            raise error from raised
        if watch is not None:
            watch.close()


def _end(report: FailureReport | None, directory: Path) -> None:
    """End this process, or let its launcher do so; only the rank with the report prints it."""
    if report is not None:
        # A full disk may be the cause of the failure; report it anyway.
        with (
            contextlib.suppress(OSError),
            (directory / FAILURE).open("a", encoding="utf-8") as file,
        ):
            file.write(f"{datetime.now().isoformat(timespec='seconds')} {report.text}\n\n")
        if report_failure(report.rank, report.error, report.text):
            return
        sys.stderr.write(f"wlb train: {report.text}\n")
        sys.stderr.flush()
    elif is_launched():
        return
    # sys.exit would join threads that wait for lost ranks in a save or a collective.
    os._exit(1)


@contextlib.contextmanager
def rank_log(folder: Path, rank: int, place: str) -> Iterator[None]:
    """Copy stderr, and stdout except on rank 0, as written by Python, to `folder/rank-<n>.log`."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(AppendedFile(folder / f"rank-{rank}.log")) as log:
        log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank}: {place}\n")
        out = (
            contextlib.redirect_stdout(_Tee(sys.stdout, log)) if rank else contextlib.nullcontext()
        )
        with contextlib.redirect_stderr(_Tee(sys.stderr, log)), out:
            yield


class _Tee:
    """A stream that also writes to a log."""

    def __init__(self, stream: IO[str], log: AppendedFile) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
