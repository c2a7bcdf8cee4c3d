"""Chooses which tests run and provides fixtures for several folders.

The sets are those of pyproject.toml. A rule marks tests that start processes.
"""

import multiprocessing.process
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A shell's background job ignores Ctrl-C, and so would every process that a test starts: some
# tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread for this process and those that tests start, set before torch is loaded. Workers of
# pytest keep the cores busy, so a second OpenMP thread would spin while it waits for its core, and
# tests of small tensors would take five to ten times as long.
os.environ["OMP_NUM_THREADS"] = "1"

# Property tests leave the number of examples to these. A deadline would depend on the load.
_COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "print_blob": True,
}
settings.register_profile("quick", max_examples=25, **_COMMON)
settings.register_profile("full", max_examples=40, **_COMMON)
settings.register_profile("nightly", max_examples=300, **_COMMON)

# Mark expressions of the three sets. `hypothesis` is the mark that Hypothesis gives its tests.
QUICK = "not full and not nightly"
FULL = "not nightly"
NIGHTLY = "nightly or hypothesis"
WORKERS = 2  # pytest's processes; tests of several ranks keep more cores than these busy

PRELOADED = ("tests.parity.body", "tests.train.case", "wlb.train.loop")
"""Modules that most ranks import. Their server imports them once, instead of each rank in 0.7 s."""

_running: list[pytest.Item] = []  # the test that runs now, in this process
_unmarked: dict[str, str] = {}  # tests that started a process without a mark, and what they started


def pytest_configure(config: pytest.Config) -> None:
    """Turns the three sets into mark expressions: quick without `-m`, `-m full`, `-m nightly`.

    `-m full` means quick and full tests together, which no mark expression says without naming
    all marks; `-m nightly` also takes property tests, with the most examples. A test that is named
    by its id runs whatever its marks are. Workers of pytest-xdist get the expression that the main
    process has made.
    """
    chosen = config.option.markexpr
    if chosen in ("full", "nightly"):
        config.option.markexpr = {"full": FULL, "nightly": NIGHTLY}[chosen]
    elif not chosen and not _is_named(config):
        config.option.markexpr = QUICK
    profiles = {QUICK: "quick", NIGHTLY: "nightly"}
    settings.load_profile(profiles.get(config.option.markexpr, "full"))
    _watch_process_starts()


def _is_named(config: pytest.Config) -> bool:
    return any("::" in str(argument) for argument in config.args)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Shares folders of tests among workers, and runs files and named tests in this process,
    where a debugger reaches them and no worker has to start first. Tests of GPUs share the GPUs.
    """
    is_gpu = config.option.markexpr == "gpu"
    if is_gpu or (config.args and all(_is_file(argument) for argument in config.args)):
        config.option.dist = "no"
        return 0
    return WORKERS


LONGEST = ("slurm", "rehearse", "parity", "parallel", "train", "adapters", "launch", "doctor")
"""Folders whose files take minutes each. They begin first, so that at the end no worker computes
one of them while the other has nothing left."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take longest first; files keep their order otherwise."""

    def place(item: pytest.Item) -> int:
        folders = item.nodeid.split("/")[1:2]
        return next((i for i, name in enumerate(LONGEST) if name in folders), len(LONGEST))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Has the server that ranks are forked from import `PRELOADED`, where any test starts ranks."""
    if launcher := sys.modules.get("wlb.launch.local"):
        launcher.PRELOAD_IF_LOADED += tuple(n for n in PRELOADED if n in sys.modules)


def _is_file(argument: object) -> bool:
    return str(argument).partition("::")[0].endswith(".py")


def _watch_process_starts() -> None:
    """Notes tests that start Python processes and have neither the mark `dist` nor `process`."""
    popen, start = subprocess.Popen.__init__, multiprocessing.process.BaseProcess.start

    def noted_popen(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        words = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
        program = os.path.basename(os.fsdecode(words[0]))
        # Not git, a compiler or a solver, which libraries run, nor the one process that renders
        # the chat templates of all tests.
        is_renderer = any(str(word).endswith("render_process.py") for word in words)
        if program.startswith("python") and not is_renderer:
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


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collects what a worker of pytest-xdist has noted."""
    _unmarked.update(getattr(node, "workeroutput", {}).get("unmarked", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # this process is a worker
        session.config.workeroutput["unmarked"] = _unmarked
    elif _unmarked and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _unmarked:
        terminalreporter.section("tests that start a process: mark them `process` or `dist`")
        for name, program in _unmarked.items():
            terminalreporter.line(f"{name} ({program})")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Notes which test runs; the fixtures that it makes are part of it."""
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()
