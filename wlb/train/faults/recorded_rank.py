"""Runs a rank's training with a log file, a note of what it is doing, and a record of its failure.

The note is called the rank's position. If a rank fails, `wlb.launch.report` makes one report from
the positions and failures of all ranks. It says which rank failed first and what the other ranks
were doing.
"""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from wlb.launch.failure import FailedRank, stack_path, stacks_to, unless_unwritable, write_failure
from wlb.launch.position import Position, SlotOwner
from wlb.launch.report import LOGS
from wlb.parallel.mesh import Mesh
from wlb.parallel.world import Origin, World
from wlb.train.faults.disk_full import full_disk
from wlb.train.telemetry.appended import AppendedFile


@contextlib.contextmanager
def recorded(directory: Path, records: Path, *, world: World, mesh: Mesh) -> Iterator[Position]:
    """While the block runs, log this rank's output, and record what it is doing and its failure.

    An error in the block is first written to `records`. A local rank then raises the error, and the
    process that launched the local ranks ends the other ranks. A rank of torchrun or Slurm ends its
    own process, which makes the launcher end the other ranks.

    Args:
        directory: The run's folder, in which logs are written.
        records: The folder in which the ranks of this start of the run note what they are doing,
            and record their failures.
        world: This rank's place among the processes of the launcher.
        mesh: This rank's place in the layout.

    Yields:
        The object in which training notes what this rank is doing.
    """
    c = mesh.at
    words = (
        f"tp {c.tp}, cp {c.cp}, pp {c.pp}, dp {c.dp}; process {os.getpid()} on "
        f"{socket.gethostname()}, {mesh.device}"
    )
    position = _opened(records, _owner(world, words))
    is_alone, is_given = world.world_size == 1, world.origin in (Origin.TORCHRUN, Origin.SLURM)
    with contextlib.ExitStack() as opened:
        if not is_alone:
            opened.enter_context(rank_log(directory / LOGS, world.rank, words))
        if is_given:
            # After a rank has failed, torchrun and srun send SIGTERM to the other ranks before they
            # kill them. On this signal, each rank writes its call stack.
            path = stack_path(records, world.rank)
            with unless_unwritable(path):
                opened.enter_context(stacks_to(path, signal.SIGTERM, chain=True))
        try:
            yield position
        except Exception as raised:
            # A full disk causes many kinds of errors. Replace each by the same explanation.
            error = full_disk(raised) or raised
            where = position.now().describe()
            failure = FailedRank.of(error, world.rank, world.world_size, position=where)
            write_failure(records, failure)
            if is_given and not is_alone:
                _leave(failure, world)
            error.add_note(f"in {where}")
            if error is raised:
                raise
            raise error from raised
        except BaseException:
            # After KeyboardInterrupt or SystemExit, the rank has not failed but was ended.
            position.end()
            raise
        position.end()


def _opened(records: Path, owner: SlotOwner) -> Position:
    """Open the file in `records` in which this rank notes what it is doing.

    If nothing can be written to that folder, the notes are kept in memory only.
    """
    with unless_unwritable(records):
        records.mkdir(parents=True, exist_ok=True)
        return Position.opened(records, owner)
    return Position()


def _owner(world: World, words: str) -> SlotOwner:
    return SlotOwner(
        rank=world.rank,
        world_size=world.world_size,
        local_rank=world.local_rank,
        local_world_size=world.local_world_size,
        node_rank=world.node_rank,
        words=words,
    )


def _leave(failure: FailedRank, world: World) -> None:
    """Print the failure and end this process, so that torchrun or Slurm ends the other ranks."""
    lines = [
        f"wlb train: rank {failure.rank} of {world.world_size} failed: {failure.error}",
        f"  in {failure.position}",
        *failure.traceback,
    ]
    sys.stderr.write("\n".join(lines) + "\n")
    sys.stderr.flush()
    # Not sys.exit, because it waits for threads, which may wait forever for lost ranks.
    os._exit(1)


@contextlib.contextmanager
def rank_log(folder: Path, rank: int, place: str) -> Iterator[None]:
    """While the block runs, also write Python's stderr to the file `rank-<n>.log` in `folder`.

    On ranks other than 0, stdout is written to the file too.

    Args:
        folder: Folder of the logs.
        rank: This rank's number.
        place: Description of the rank, for the first line of the log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(AppendedFile(folder / f"rank-{rank}.log")) as log:
        log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank}: {place}\n")
        out = (
            contextlib.redirect_stdout(_Tee(sys.stdout, log)) if rank else contextlib.nullcontext()
        )
        with contextlib.redirect_stderr(_Tee(sys.stderr, log)), out:
            yield


class _Tee:
    """An output stream that writes each text both to another stream and to a log."""

    def __init__(self, stream: IO[str], log: AppendedFile) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
