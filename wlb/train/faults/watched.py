"""A rank's training under the watch of the others (`wlb.launch.watch`), with a log of its own."""

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
    """What is inside is one rank's part of a run in `directory`; all ranks enter it together.

    An exception is told to the other ranks, and ends this process with theirs where no launcher
    does. Without a watch where training.heartbeat_s is 0. A single rank has none: no one waits for
    it.
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
    """Ends this process, or has its launcher do that; only the rank with the report says why."""
    if report is not None:
        # The disk may be what failed; the report goes on all the same.
        with suppress(OSError), (directory / FAILURE).open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now().isoformat(timespec='seconds')} {report.text}\n\n")
        if report_failure(report.rank, report.error, report.text):
            return
        sys.stderr.write(f"wlb train: {report.text}\n")
        sys.stderr.flush()
    elif is_launched():
        return
    # Not sys.exit: threads that wait for lost ranks, in a save or a collective, would be joined.
    os._exit(1)


@contextmanager
def rank_log(folder: Path, rank: int, place: str) -> Iterator[None]:
    """What this process writes to stderr goes to `folder/rank-<n>.log` as well, and so does its
    stdout but for rank 0, which shows the run there. What libraries write past Python does not."""
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
    """A stream that writes to a log as well."""

    def __init__(self, stream: IO[str], log: AppendedFile) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
