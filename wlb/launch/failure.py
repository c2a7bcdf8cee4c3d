"""What a rank leaves behind when it fails: its exception and its stack.

Each start of a run has a folder of records, `ranks/start-TIME` in the run's folder. A rank writes
`failure-RANK.json` there, whole or not at all, and faulthandler writes `stack-RANK.txt`. Positions
(`wlb.launch.position`) are beside them.
"""

import contextlib
import faulthandler
import json
import os
import re
import secrets
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from wlb.plan import RunError, UserError

_RECORDS, _START = "ranks", "start-"
DUMP_SIGNAL = signal.SIGUSR2
"""Makes a rank write its stacks. SIGUSR1 comes from Slurm and means to save and end."""
_MOST_CHARACTERS = 4000
_MOST_LINES = 100
_FATAL = "Fatal Python error: "
_TORCH_STAGE = re.compile(r"failed to run (forward|stage backward)", re.IGNORECASE)
"""In the RuntimeError that torch.distributed.pipelining raises from the exception of a stage."""


class FailureKind(StrEnum):
    """How a rank failed."""

    RAISED = "raised"  # an exception, written by the rank itself
    DIED = "died"  # the process ended by a signal or an exit code
    SILENT = "silent"  # the process exists, and does not answer


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRank:
    """Failure of one rank."""

    rank: int
    world_size: int  # ranks of the run
    kind: FailureKind
    error: str  # one line: "KeyError: 'x'", "died from SIGKILL (exit code -9)"
    time_s: float  # Unix time
    traceback: list[str] = field(default_factory=list[str])  # its last lines
    position: str = ""  # of the rank, in words

    @classmethod
    def of(
        cls, error: BaseException, rank: int, world_size: int, *, position: str = ""
    ) -> "FailedRank":
        """Of an exception that the rank raised. Its cause is named where torch's stage of a
        pipeline wraps it; any other exception says itself what failed.
        """
        line, trace = in_words(error)
        while _TORCH_STAGE.search(str(error)) and error.__cause__ is not None:
            error = error.__cause__
            line = in_words(error)[0]
        return cls(
            rank=rank,
            world_size=world_size,
            kind=FailureKind.RAISED,
            error=_short(line),
            time_s=time.time(),
            traceback=[_short(line) for line in trace.splitlines()[-_MOST_LINES:]],
            position=position,
        )


def records_of(directory: Path, started_s: float) -> Path:
    """The folder of records of a start, in the run's folder; started_s: Unix time of the start."""
    return directory / _RECORDS / f"{_START}{started_s:.3f}"


def new_records(directory: Path, started_s: float) -> Path:
    """Make that folder, and remove those of all starts but the one before."""
    folder = records_of(directory, started_s)
    for old in _starts(directory)[:-1]:
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def newest_records(directory: Path) -> Path:
    """The folder of records of the last start; one that does not exist if there was none."""
    return [records_of(directory, 0.0), *_starts(directory)][-1]


def forget_records(records: Path) -> None:
    """Empty the folder of records of a start that was ended on purpose."""
    for path in records.glob("*"):
        with contextlib.suppress(OSError):
            path.unlink()


def began_s(records: Path) -> float:
    """Unix time of the start that a folder of records is of."""
    return float(records.name.removeprefix(_START))


def _starts(directory: Path) -> list[Path]:
    found = (directory / _RECORDS).glob(f"{_START}*")
    return sorted((path for path in found if _is_number(path.name[len(_START) :])), key=began_s)


def _is_number(text: str) -> bool:
    """Somebody may have copied a folder of records beside itself, as start-1.000.bak."""
    return re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) is not None


def in_words(error: BaseException) -> tuple[str, str]:
    """An exception in one line without its notes, and its traceback, "" where the line is enough
    (RunError, UserError).
    """
    if isinstance(error, RunError | UserError):
        return " ".join(str(error).split("\n")), ""
    line = traceback.format_exception_only(error)[0].strip()
    return line, "".join(traceback.format_exception(error))


def write_failure(folder: Path, failure: FailedRank) -> None:
    """Write a rank's failure, unless it has one: what it raised first explains what followed. A
    disk without room keeps nothing, and the failure goes on.
    """
    final = folder / f"failure-{failure.rank}.json"
    part = folder / f".{final.name}.{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        try:
            part.write_text(json.dumps(asdict(failure)), "utf-8")
            try:
                os.link(part, final)
            except FileExistsError:
                raise
            except OSError:
                # Some network file systems have no hard links.
                if not final.exists():
                    part.replace(final)
        finally:
            part.unlink(missing_ok=True)


def read_failures(folder: Path) -> dict[int, FailedRank]:
    """Failures of a folder by rank. A file that is no failure of this version is left out."""
    found: dict[int, FailedRank] = {}
    for path in sorted(folder.glob("failure-*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
            read = json.loads(path.read_text("utf-8"))
            failure = FailedRank(**{**read, "kind": FailureKind(read["kind"])})
            found[failure.rank] = failure
    return found


@contextlib.contextmanager
def unless_unwritable(path: Path) -> Iterator[None]:
    """Records explain failures; a run does not fail because it cannot write them."""
    try:
        yield
    except OSError as error:
        sys.stderr.write(
            f"wlb: {path} cannot be written ({error}): if the run fails, its report will know "
            f"less\n"
        )


@contextlib.contextmanager
def stacks_to(path: Path, number: int, *, chain: bool = False) -> Iterator[None]:
    """Write stacks to a file: of all threads on a fatal signal (SIGSEGV, SIGABRT, ...), and of the
    thread that gets it when signal `number` comes, also while this process waits in C.

    The kernel gives a process's signal to its main thread. Stacks of threads that run on cannot be
    read safely: on Python 3.12 and later that ends a healthy process now and then.

    Args:
        path: Of the file, which is replaced.
        number: The signal.
        chain: Whether the signal does what it did before as well.
    """
    was_enabled = faulthandler.is_enabled()
    with path.open("w") as file:
        faulthandler.enable(file=file)
        faulthandler.register(number, file=file, all_threads=False, chain=chain)
        try:
            yield
        finally:
            faulthandler.unregister(number)
            faulthandler.disable()
            if was_enabled and sys.__stderr__ is not None:
                faulthandler.enable(file=sys.__stderr__)


def stack_path(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}.txt"


def read_stack(folder: Path, rank: int) -> str:
    """The stacks that a rank wrote, newest thread first and most recent call first; "" if none."""
    try:
        return stack_path(folder, rank).read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""


def main_stack(text: str) -> list[str]:
    """Frames of the main thread, most recent call first, in what `read_stack` returns."""
    *_, thread = ["", *text.split("(most recent call first):\n")[1:]]
    return thread.partition("\n\n")[0].splitlines()


def fatal_error(text: str) -> str:
    """The signal that ended the process, as faulthandler writes it: "Aborted"; "" if none did."""
    return text.rpartition(_FATAL)[2].partition("\n")[0] if _FATAL in text else ""


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + " ..."
