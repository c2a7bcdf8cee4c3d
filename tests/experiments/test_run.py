"""Tests `python -m experiments.run` on a registry of small modules in a temporary folder."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from experiments.run import REGISTRY, Experiment, main

pytestmark = [pytest.mark.process, pytest.mark.full]

# Each appends its name and arguments to "log"; "slow" stays for as long as "hang" exists.
NOTE = "import sys, pathlib; pathlib.Path('log').open('a').write(' '.join([*sys.argv[1:], '']))\n"
MODULES = {
    "first": NOTE,
    "slow": NOTE + "import time\nwhile pathlib.Path('hang').exists(): time.sleep(0.02)\n",
    "last": NOTE,
}
FAKES = (
    Experiment("first", "Figure 1", 0.5, "the first", "--quick", "one", "fakes"),
    Experiment("slow", "", 12, "the slow one", "--lengths", "two", "fakes"),
    Experiment("last", "Table 9", 0.5, "the last", "", "three", "fakes"),
)
CALL = (
    "import sys, pathlib; from experiments.run import main;"
    "from tests.experiments.test_run import FAKES;"
    "sys.exit(main(sys.argv[2:], registry=FAKES, root=pathlib.Path(sys.argv[1])))"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "fakes").mkdir()
    for name, text in MODULES.items():
        (tmp_path / "fakes" / f"{name}.py").write_text(text)
    return tmp_path


def run(root: Path, *arguments: str) -> int:
    return main(arguments, registry=FAKES, root=root)


def log(root: Path) -> list[str]:
    """Returns the arguments of all that ran, in order."""
    path = root / "log"
    return path.read_text().split() if path.exists() else []


def state(root: Path) -> dict[str, dict[str, object]]:
    return json.loads((root / "runs/experiments/state.json").read_text())


def started(root: Path) -> subprocess.Popen[str]:
    """Returns `run all` in a process of its own, once "slow" runs and hangs."""
    (root / "hang").touch()
    child = subprocess.Popen(
        [sys.executable, "-c", CALL, str(root), "all"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for _ in range(30_000):
        if "two" in log(root):
            return child
        time.sleep(0.02)
    raise AssertionError("nothing ran")


def test_all_runs_once_and_says_how_long(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(root, "all") == 0
    assert log(root) == ["one", "two", "three"]
    out = capfd.readouterr().out
    assert "3 to run, about 13 minutes (slow 12)" in out
    assert "2/3 slow: the slow one (about 12 min)" in out
    first = state(root)["first"]
    assert first["finished"] is True
    assert first["arguments"] == ["fakes.first", "one"]
    assert run(root, "all") == 0
    assert log(root) == ["one", "two", "three"]
    assert "0 to run" in capfd.readouterr().out


def test_other_arguments_another_commit_and_again_run_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(root, "all")
    run(root, "all", "--lengths", "x.npy")
    path = str(Path("x.npy").resolve())
    assert log(root)[3:] == ["two", "--lengths", path]
    run(root, "all", "--again")
    assert log(root)[6:] == ["one", "two", "three"]
    monkeypatch.setattr("experiments.run.source_version", lambda: "another")
    run(root, "all")
    assert log(root)[9:] == ["one", "two", "three"]
    run(root, "last")  # asked for by name
    assert log(root)[12:] == ["three"]


def test_quick_goes_to_those_that_have_it_and_is_kept_apart(root: Path) -> None:
    run(root, "all", "--quick")
    assert log(root) == ["one", "--quick", "two", "three"]
    assert set(state(root)) == {"first --quick", "slow", "last"}
    run(root, "all")
    assert log(root)[4:] == ["one"]


def test_a_failure_does_not_stop_the_others(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (root / "fakes" / "slow.py").write_text("raise SystemExit(7)")
    assert run(root, "all") == 1
    assert log(root) == ["one", "three"]
    assert "failed: slow (exit status 7): fakes.slow two" in capfd.readouterr().out
    assert state(root)["slow"]["finished"] is False
    (root / "fakes" / "slow.py").write_text(MODULES["slow"])
    assert run(root, "all") == 0
    assert log(root) == ["one", "three", "two"]


def test_all_goes_on_after_a_kill(root: Path) -> None:
    child = started(root)
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    (root / "hang").unlink()
    assert run(root, "all") == 0
    assert log(root) == ["one", "two", "two", "three"]


def test_ctrl_c_ends_the_child_and_says_how_to_go_on(root: Path) -> None:
    child = started(root)
    os.killpg(child.pid, signal.SIGINT)
    out, _ = child.communicate(timeout=600)
    assert child.returncode == 130
    assert "to resume: python -m experiments.run" in out
    assert state(root)["slow"]["status"] == "interrupted"
    assert "three" not in log(root)


def test_an_unknown_name_lists_the_known(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(root, "first", "lats") == 2
    error = capfd.readouterr().err
    for name in ("'lats'", "'last'", "all, first, last, slow"):
        assert name in error
    assert log(root) == []


def test_the_list_shows_what_there_is_and_what_ran(
    root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(root, "first")
    capfd.readouterr()
    assert run(root, "--list") == 0
    out = capfd.readouterr().out
    for word in ("first", "Figure 1", "--quick", " ok", "slow", "12", "Table 9"):
        assert word in out


def test_every_experiment_of_the_registry_exists() -> None:
    assert len({e.name for e in REGISTRY}) == len(REGISTRY)
    for e in REGISTRY:
        module = f"{e.package}.{e.module}"
        assert find_spec(f"{module}.__main__"), module
