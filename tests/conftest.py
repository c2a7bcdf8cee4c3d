"""Chooses which tests run, and requires marks on tests that start processes.

pyproject.toml describes the three sets of tests: quick, full and nightly.
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

# Some tests send Ctrl-C to processes that they start. If pytest is a background job of a shell, it
# ignores Ctrl-C, and these processes would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Use one OpenMP thread here and in processes that tests start; this must be set before torch is
# imported. The workers of pytest keep the cores busy. A second thread would spin while it waits for
# a core, and tests of small tensors would take five to ten times as long.
os.environ["OMP_NUM_THREADS"] = "1"

# Profiles that set the number of examples of property tests. There is no deadline, because times
# depend on the load of the machine.
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
WORKERS = 2  # processes of pytest-xdist; tests of several ranks use more cores than these

PRELOADED = ("tests.parity.body", "tests.train.case", "wlb.train.loop")
"""Modules that most ranks import, which takes 0.7 s.

The server from which ranks are forked imports them once.
"""

_running: list[pytest.Item] = []  # the test that runs now in this process
_unmarked: dict[str, str] = {}  # unmarked tests that started a process, and the program's name


def pytest_configure(config: pytest.Config) -> None:
    """Turns the names of the sets into mark expressions.

    Without `-m` the quick set runs. `-m full` runs the quick and the full set, and `-m nightly` the
    nightly set and all property tests, with the most examples. A test that is named by its id runs
    whatever its marks are. Workers of pytest-xdist get the expression from the main process.
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
    """Returns the number of pytest-xdist's workers: several for folders of tests, 0 for files.

    Files and named tests run in this process, where a debugger works and no worker must start
    first. GPU tests run one after the other, because they share the GPUs.
    """
    is_gpu = config.option.markexpr == "gpu"
    if is_gpu or (config.args and all(_is_file(argument) for argument in config.args)):
        config.option.dist = "no"
        return 0
    return WORKERS


LONGEST = ("slurm", "rehearse", "parity", "parallel", "train", "adapters", "launch", "doctor")
"""Folders whose files take minutes each.

They start first. Otherwise one worker could be busy with such a file at the end, while the other
has nothing to do.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the files in folders of LONGEST to the front; otherwise the order stays."""

    def place(item: pytest.Item) -> int:
        folders = item.nodeid.split("/")[1:2]
        return next((i for i, name in enumerate(LONGEST) if name in folders), len(LONGEST))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Tells the server from which ranks are forked to import `PRELOADED`, if tests need them."""
    if launcher := sys.modules.get("wlb.launch.local"):
        launcher.PRELOAD_IF_LOADED += tuple(n for n in PRELOADED if n in sys.modules)


def _is_file(argument: object) -> bool:
    return str(argument).partition("::")[0].endswith(".py")


def _watch_process_starts() -> None:
    """Records tests that start Python processes without the mark `dist`, `process` or `slurm`.

    It replaces the functions of the standard library that start processes.
    """
    popen, start = subprocess.Popen.__init__, multiprocessing.process.BaseProcess.start

    def noted_popen(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        words = [args] if isinstance(args, str | bytes | os.PathLike) else list(args)
        program = os.path.basename(os.fsdecode(words[0]))
        # Programs that libraries run, such as git, compilers and solvers, do not count. Neither
        # does the process that renders chat templates, which all tests share.
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
    """Collects the tests that a worker of pytest-xdist has recorded."""
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
    """Records which test runs, including its fixtures."""
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()
