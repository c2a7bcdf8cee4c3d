"""What a rank leaves behind when it fails: its exception and its stack.

Each start of a run has a folder of records, `ranks/start-TIME` in the run's folder. A failing rank
writes `failure-RANK.json` there, whole or not at all, and Python's faulthandler writes
`stack-RANK.txt`. The ranks' positions (`wlb.launch.position`) are in the same folder.
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

_RECORDS, _START = "ranks", "start-"  # parts of the name of a folder of records
DUMP_SIGNAL = signal.SIGUSR2
"""Signal at which a rank writes its stacks.

SIGUSR1 is taken: Slurm sends it to let a run save and end."""
_MOST_CHARACTERS = 4000  # longer lines are cut
_MOST_LINES = 100  # of a traceback, only so many last lines are kept
_FATAL = "Fatal Python error: "  # faulthandler writes this before the signal's name
_TORCH_STAGE = re.compile(r"failed to run (forward|stage backward)", re.IGNORECASE)
"""Text of the RuntimeError in which torch.distributed.pipelining wraps a stage's exception."""


class FailureKind(StrEnum):
    """How a rank failed."""

    RAISED = "raised"  # an exception, written by the rank itself
    DIED = "died"  # the process ended by a signal or an exit code
    SILENT = "silent"  # the process exists but does not respond


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRank:
    """The failure of one rank."""

    rank: int
    world_size: int  # number of ranks of the run
    kind: FailureKind
    error: str  # one line, for example "KeyError: 'x'" or "died from SIGKILL (exit code -9)"
    time_s: float  # Unix time of the failure
    traceback: list[str] = field(default_factory=list[str])  # last lines of the traceback
    position: str = ""  # where the rank was, in words

    @classmethod
    def of(
        cls, error: BaseException, rank: int, world_size: int, *, position: str = ""
    ) -> "FailedRank":
        """Return the failure for an exception that the rank raised.

        torch's pipeline wraps the exception of a stage; the error line then names the wrapped
        exception.

        Args:
            error: The exception.
            rank: The rank.
            world_size: Number of ranks of the run.
            position: Where the rank was, in words.
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
    """Return the folder of records of a start.

    Args:
        directory: The run's folder.
        started_s: Unix time of the start.
    """
    return directory / _RECORDS / f"{_START}{started_s:.3f}"


def new_records(directory: Path, started_s: float) -> Path:
    """Create the folder of records of a start, and remove all older ones but the last.

    Args:
        directory: The run's folder.
        started_s: Unix time of the start.
    """
    folder = records_of(directory, started_s)
    for old in _starts(directory)[:-1]:
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def newest_records(directory: Path) -> Path:
    """Return the folder of records of the last start.

    If there was none, it is a path that does not exist.
    """
    return [records_of(directory, 0.0), *_starts(directory)][-1]


def forget_records(records: Path) -> None:
    """Empty the folder of records of a start that was ended on purpose."""
    for path in records.glob("*"):
        with contextlib.suppress(OSError):
            path.unlink()


def began_s(records: Path) -> float:
    """Return the Unix time of the start to which a folder of records belongs."""
    return float(records.name.removeprefix(_START))


def _starts(directory: Path) -> list[Path]:
    found = (directory / _RECORDS).glob(f"{_START}*")
    return sorted((path for path in found if _is_number(path.name[len(_START) :])), key=began_s)


def _is_number(text: str) -> bool:
    """Return whether a folder's name has a time in it.

    Somebody may have copied a folder of records, for example as start-1.000.bak.
    """
    return re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) is not None


def in_words(error: BaseException) -> tuple[str, str]:
    """Return an exception as one line without its notes, and its traceback.

    The traceback is "" for a RunError or UserError, whose message is enough.
    """
    if isinstance(error, RunError | UserError):
        return " ".join(str(error).split("\n")), ""
    line = traceback.format_exception_only(error)[0].strip()
    return line, "".join(traceback.format_exception(error))


def write_failure(folder: Path, failure: FailedRank) -> None:
    """Write a rank's failure, unless it has written one already.

    The first exception explains the ones that follow from it, so it is kept. If the disk is full,
    nothing is written and the failure is reported without the file.
    """
    final = folder / f"failure-{failure.rank}.json"
    # Write to another name and link it, so that readers see the whole file or none. `link` fails if
    # the file exists.
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
    """Return the failures in a folder of records, by rank.

    Files that this version cannot read are left out.
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
    """Warn about OSError in this context instead of raising it.

    Records only explain failures, so a run must not fail because it cannot write them.

    Args:
        path: The file that is written in this context.
    """
    try:
        yield
    except OSError as error:
        sys.stderr.write(
            f"wlb: {path} cannot be written ({error}): if the run fails, its report will have "
            f"less detail\n"
        )


@contextlib.contextmanager
def stacks_to(path: Path, number: int, *, chain: bool = False) -> Iterator[None]:
    """Write Python stacks to a file, even while this process waits inside C code.

    On a fatal signal (SIGSEGV, SIGABRT, ...) the file gets the stacks of all threads. When the
    signal `number` comes, it gets the stack of the thread that receives it, which is the main
    thread. The stacks of threads that keep running cannot be read safely: on Python 3.12 and later
    that sometimes kills a healthy process.

    Args:
        path: The file, which is replaced.
        number: The signal.
        chain: Whether the signal's previous handler runs as well.
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
    """Return the file of a rank's stacks."""
    return folder / f"stack-{rank}.txt"


def read_stack(folder: Path, rank: int) -> str:
    """Return the stacks that a rank wrote; "" if it wrote none.

    The newest thread and the most recent call come first.
    """
    try:
        return stack_path(folder, rank).read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""


def main_stack(text: str) -> list[str]:
    """Return the frames of the main thread, most recent call first, from `read_stack`'s text."""
    *_, thread = ["", *text.split("(most recent call first):\n")[1:]]
    return thread.partition("\n\n")[0].splitlines()


def fatal_error(text: str) -> str:
    """Return the signal that ended the process, as faulthandler names it ("Aborted").

    It is "" if no signal did.
    """
    return text.rpartition(_FATAL)[2].partition("\n")[0] if _FATAL in text else ""


def _short(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + " ..."
