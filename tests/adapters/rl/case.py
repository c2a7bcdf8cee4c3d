"""Shared by tests of RL adapters: lengths of a step, signatures, and running a library's tests."""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[3]
LENGTHS = np.minimum(np.random.default_rng(0).lognormal(5, 0.9, 96), 1000).astype(int).tolist()


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def run_their_tests(adapter: str, file: Path, tests: list[str], tmp_path: Path) -> None:
    """Runs a library's own tests with wlb's adapter installed, and expects them to pass.

    Args:
        adapter: Module in wlb.adapters that is installed.
        file: Test file of the library.
        tests: Tests of the file; empty for all.
        tmp_path: Folder to run in.
    """
    (tmp_path / "conftest.py").write_text(
        f"import wlb.adapters.{adapter} as adapter\nadapter.install()\n"
    )
    (tmp_path / file.name).write_text(file.read_text("utf-8"))
    names = [f"{file.name}::{name}" for name in tests] or [file.name]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", *names],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
