"""Write and read what explains the failure of a rank: its exception and its stack.

Each time a run is started or resumed, it gets a folder of failure records, `ranks/start-TIME` in
the run's folder. There, a failing rank writes `failure-RANK.json` (atomically), and Python's
faulthandler writes `stack-RANK.txt`. `wlb.launch.position` writes there what each rank is doing.
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

_RECORDS, _START = "ranks", "start-"  # a folder of failure records is ranks/start-TIME
DUMP_SIGNAL = signal.SIGUSR2
"""Signal on which a rank writes its Python stack to a file.

SIGUSR1 has another meaning: Slurm sends it to make a run save a checkpoint and end."""
_MOST_CHARACTERS = 4000  # most characters of a line in a record; the rest is cut off
_MOST_LINES = 100  # how many lines of a traceback are recorded, from its end
_FATAL = "Fatal Python error: "  # text that faulthandler writes before the signal's name
_TORCH_STAGE = re.compile(r"failed to run (forward|stage backward)", re.IGNORECASE)
"""Matches the message of the RuntimeError in which torch's pipelining wraps an exception."""


class FailureKind(StrEnum):
    """How a rank failed."""

    RAISED = "raised"  # an exception, written by the rank itself
    DIED = "died"  # the process ended by a signal or with an exit code, without an exception
    SILENT = "silent"  # the process exists but does not react to signals


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRank:
    """How and when one rank failed."""

    rank: int  # the rank that failed
    world_size: int  # number of ranks of the run
    kind: FailureKind
    error: str  # one line, for example "KeyError: 'x'" or "died from SIGKILL (exit code -9)"
    time_s: float  # Unix time of the failure
    traceback: list[str] = field(default_factory=list[str])  # last lines of the traceback
    position: str = ""  # what the rank was doing, for example "step 12: saving"; "" if unknown

    @classmethod
    def of(
        cls, error: BaseException, rank: int, world_size: int, *, position: str = ""
    ) -> "FailedRank":
        """Return the failure of a rank that raised an exception.

        If torch's pipelining has wrapped the exception of a stage in a RuntimeError, the field
        `error` names the original exception.

        Args:
            error: The exception.
            rank: The rank.
            world_size: Number of ranks of the run.
            position: What the rank was doing, in words.
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
    """Return the folder of failure records for one start of a run.

    Args:
        directory: The run's folder.
        started_s: Unix time at which the run was started or resumed.
    """
    return directory / _RECORDS / f"{_START}{started_s:.3f}"


def new_records(directory: Path, started_s: float) -> Path:
    """Create the folder of failure records for a new start of a run, and return it.

    Of the folders of earlier starts, only the most recent one is kept.

    Args:
        directory: The run's folder.
        started_s: Unix time at which the run is started or resumed.
    """
    folder = records_of(directory, started_s)
    for old in _starts(directory)[:-1]:
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def newest_records(directory: Path) -> Path:
    """Return the folder with the failure records of the run's most recent start.

    If the run has no such folder, the path that is returned does not exist.

    Args:
        directory: The run's folder.
    """
    return [records_of(directory, 0.0), *_starts(directory)][-1]


def forget_records(records: Path) -> None:
    """Delete all files in a folder of failure records, because the run was ended on purpose."""
    for path in records.glob("*"):
        with contextlib.suppress(OSError):
            path.unlink()


def began_s(records: Path) -> float:
    """Return the Unix time in the name of a folder of failure records: when the run started."""
    return float(records.name.removeprefix(_START))


def _starts(directory: Path) -> list[Path]:
    found = (directory / _RECORDS).glob(f"{_START}*")
    return sorted((path for path in found if _is_number(path.name[len(_START) :])), key=began_s)


def _is_number(text: str) -> bool:
    """Return whether a text is a decimal number, as in the name of a folder of failure records.

    The result is False for the "1.000.bak" of start-1.000.bak, a copy of such a folder.
    """
    return re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) is not None


def in_words(error: BaseException) -> tuple[str, str]:
    """Return a pair: an exception as one line (without its notes), and its traceback.

    For a RunError or UserError the traceback is "", because the message says enough.
    """
    if isinstance(error, RunError | UserError):
        return " ".join(str(error).split("\n")), ""
    line = traceback.format_exception_only(error)[0].strip()
    return line, "".join(traceback.format_exception(error))


def write_failure(folder: Path, failure: FailedRank) -> None:
    """Write a rank's failure to a file, unless the rank has already written one.

    The first exception is kept, because later ones are usually its consequences. If the disk is
    full, no file is written, and no error is raised.

    Args:
        folder: The folder of failure records.
        failure: The failure.
    """
    final = folder / f"failure-{failure.rank}.json"
    # Write under another name, then link the file to its final name. So readers see the whole file
    # or none, and `link` fails if the final name exists.
    part = folder / f".{final.name}.{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        try:
            part.write_text(json.dumps(asdict(failure)), "utf-8")
            try:
                os.link(part, final)
            except FileExistsError:
                raise
            except OSError:
                # Some network file systems have no hard links, so rename the file instead.
                if not final.exists():
                    part.replace(final)
        finally:
            part.unlink(missing_ok=True)


def read_failures(folder: Path) -> dict[int, FailedRank]:
    """Return the failures in a folder of failure records, by rank.

    Corrupt files and files of other versions of wlb are ignored.
    """
    found: dict[int, FailedRank] = {}
    for path in sorted(folder.glob("failure-*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
            read = json.loads(path.read_text("utf-8"))
            failure = FailedRank(**{**read, "kind": FailureKind(read["kind"])})
            found[failure.rank] = failure
    return found


@contextlib.contextmanager
def unless_unwritable(path: Path) -> Iterator[None]:
    """Within this context, print a warning for an OSError instead of raising it.

    The files that are written in such a context only explain failures. So a run must not fail if
    they cannot be written.

    Args:
        path: The file that is written in this context.
    """
    try:
        yield
    except OSError as error:
        sys.stderr.write(
            f"wlb: {path} cannot be written ({error}); if the run fails, its report will have "
            f"less detail\n"
        )


@contextlib.contextmanager
def stacks_to(path: Path, number: int, *, chain: bool = False) -> Iterator[None]:
    """Within this context, write this process's Python stacks to a file when it gets a signal.

    This works even while the process waits in C code. On a fatal signal (SIGSEGV, SIGABRT, ...) the
    stacks of all threads are written. On the signal `number`, only the stack of the main thread is
    written: on Python 3.12 and later, reading the stacks of running threads sometimes kills the
    process.

    Args:
        path: The file; an existing one is replaced.
        number: The signal.
        chain: Whether the signal's previous handler is called as well.
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
    """Return the path of the file to which a rank writes its stacks."""
    return folder / f"stack-{rank}.txt"


def read_stack(folder: Path, rank: int) -> str:
    """Return the text of the stacks that a rank wrote; "" if it wrote none.

    The newest thread comes first. Within a thread, the most recent call comes first.
    """
    try:
        return stack_path(folder, rank).read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""


def main_stack(text: str) -> list[str]:
    """Return the stack of the main thread, one line per frame, most recent call first.

    Args:
        text: Stacks of all threads, from `read_stack`.
    """
    *_, thread = ["", *text.split("(most recent call first):\n")[1:]]
    return thread.partition("\n\n")[0].splitlines()


def fatal_error(text: str) -> str:
    """Return the fatal signal that a process got, as faulthandler names it ("Aborted").

    The result is "" if there was none.

    Args:
        text: Stacks of all threads, from `read_stack`.
    """
    return text.rpartition(_FATAL)[2].partition("\n")[0] if _FATAL in text else ""


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + " ..."
