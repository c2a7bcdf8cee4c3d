"""Run a rank's training with its own log, watched by the other ranks (`wlb.launch.watch`)."""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from wlb.launch.failure import FailureReport
from wlb.launch.local import is_launched, report_failure
from wlb.launch.position import Position, describe
from wlb.launch.watch import Watch, WatchOptions
from wlb.parallel.mesh import Mesh
from wlb.parallel.world import World
from wlb.spec import RunSpec
from wlb.train.telemetry.appended import AppendedFile

LOGS = "logs"
FAILURE = "failure.txt"


@contextmanager
def watched(
    directory: Path, spec: RunSpec, *, world: World, mesh: Mesh, position: Position
) -> Iterator[None]:
    """Context of one rank's part of the run in `directory`; all ranks enter it together.

    An exception is reported to the other ranks and ends all of them. Single ranks, and runs with
    training.heartbeat_s = 0, have no watch.
    """
    if world.world_size == 1:
        try:
            yield
        except Exception as error:
            error.add_note(f"in {describe(position.to_json())}")
            raise
        return
    c = mesh.coordinates
    place = (
        f"tp {c.tp}, cp {c.cp}, pp {c.pp}, dp {c.dp}; process {os.getpid()} on "
        f"{socket.gethostname()}, {mesh.device}"
    )
    logs = directory / LOGS
    options = WatchOptions(
        silence_s=spec.training.heartbeat_s, stuck_s=spec.training.timeout_s, logs=logs, place=place
    )
    with rank_log(logs, world.rank, place):
        watch = None
        if spec.training.heartbeat_s:
            watch = Watch(world, position, options, lambda report: _end(report, directory))
        try:
            yield
        except Exception as error:
            if watch is not None:
                watch.raised(error)
            error.add_note(f"in {describe(position.to_json())}")
            raise
        if watch is not None:
            watch.close()


def _end(report: FailureReport | None, directory: Path) -> None:
    """End this process, or let its launcher do so; only the rank with the report prints it."""
    if report is not None:
        # A full disk may be the cause of the failure; report it anyway.
        with suppress(OSError), (directory / FAILURE).open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now().isoformat(timespec='seconds')} {report.text}\n\n")
        if report_failure(report.rank, report.error, report.text):
            return
        sys.stderr.write(f"wlb train: {report.text}\n")
        sys.stderr.flush()
    elif is_launched():
        return
    # sys.exit would join threads that wait for lost ranks in a save or a collective.
    os._exit(1)


@contextmanager
def rank_log(folder: Path, rank: int, place: str) -> Iterator[None]:
    """Copy stderr, and stdout except on rank 0, to `folder/rank-<n>.log`.

    Output that libraries write past Python's streams is not copied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = sys.stdout, sys.stderr
    with closing(AppendedFile(folder / f"rank-{rank}.log")) as log:
        log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank}: {place}\n")
        sys.stderr = _Tee(sys.stderr, log)
        if rank:
            sys.stdout = _Tee(sys.stdout, log)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


class _Tee:
    """A stream that also writes to a log."""

    def __init__(self, stream: IO[str], log: AppendedFile) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
