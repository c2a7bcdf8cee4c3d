"""Which tests run (the sets of pyproject.toml), the rule that marks tests which start processes,
and fixtures of several folders."""

import multiprocessing.process
import os
import signal
import subprocess
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A shell's background job ignores Ctrl-C, and so would every process that a test starts: some
# tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Property tests leave the number of examples to these. A deadline would depend on the load.
_COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "print_blob": True,
}
settings.register_profile("quick", max_examples=25, **_COMMON)
settings.register_profile("full", max_examples=150, **_COMMON)

_running: list[pytest.Item] = []  # the test that runs now, in this process
_unmarked: dict[str, str] = {}  # tests that started a process without a mark, and what they started


def pytest_configure(config: pytest.Config) -> None:
    """Turn the three sets into mark expressions: quick without `-m`, `-m full`, `-m nightly`.

    `-m full` means quick and full tests together, which no mark expression says without naming
    all marks. A test that is named by its id runs whatever its marks are.
    """
    chosen = config.option.markexpr
    is_named = any("::" in str(argument) for argument in config.args)
    if chosen == "full":
        config.option.markexpr = "not nightly"
    elif not chosen and not is_named:
        config.option.markexpr = "not full and not nightly"
    settings.load_profile("full" if chosen or is_named else "quick")
    _watch_process_starts()


def _watch_process_starts() -> None:
    """Note tests that start Python processes and have neither the mark `dist` nor `process`."""
    popen, start = subprocess.Popen.__init__, multiprocessing.process.BaseProcess.start

    def noted_popen(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        words = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
        program = os.path.basename(os.fsdecode(words[0]))
        if program.startswith("python"):  # not git, a compiler or a solver, which libraries run
            _note_start(program)
        popen(self, args, *rest, **options)

    def noted_start(self: Any) -> None:
        _note_start(type(self).__name__)
        start(self)

    subprocess.Popen.__init__ = noted_popen
    multiprocessing.process.BaseProcess.start = noted_start


def _note_start(program: str) -> None:
    if _running:
        marks = {mark.name for mark in _running[-1].iter_markers()}
        if not marks & {"dist", "process", "slurm"}:
            _unmarked[_running[-1].nodeid] = program


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _unmarked and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _unmarked:
        terminalreporter.section("tests that start a process: mark them `process` or `dist`")
        for name, program in _unmarked.items():
            terminalreporter.line(f"{name} ({program})")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note which test runs; the fixtures that it makes are part of it."""
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For a single rank that runs in this process: two threads on busy cores would wait for each
    other."""
    import torch  # planning tests do without it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
