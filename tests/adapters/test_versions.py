"""Tests that a missing or too old library is named together with the version that is needed."""

import subprocess
import sys
from importlib import metadata

import pytest

from wlb.adapters.versions import require


def test_what_is_there_is_taken() -> None:
    require("numpy>=1.26", "rich>=13.7")


def test_a_missing_library_is_named_with_its_version() -> None:
    message = (
        r"needs no-such-library 3.1 or later, which is not installed; run: pip install 'no-such-"
    )
    with pytest.raises(ImportError, match=message):
        require("numpy>=1.26", "no-such-library>=3.1")


@pytest.mark.parametrize("found", ["0.9", "1.19.9", "1.20.0rc1.dev3", "1.20"])
def test_an_old_library_is_named_with_both_versions(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: found)
    with pytest.raises(ImportError, match=f"needs numpy 1.20.1 or later, but {found} is installed"):
        require("numpy>=1.20.1")


@pytest.mark.parametrize("found", ["1.20.1", "1.20.1+cpu", "1.21", "2", "10.0.dev1"])
def test_newer_ones_are_taken(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: found)
    require("numpy>=1.20.1")


@pytest.mark.process
@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "library"),
    [
        ("hugging_face", "transformers 5.23"),
        ("transformers_cp", "transformers 5.23"),
        ("torchtitan", "torchtitan 0.3.0"),
        ("megatron", "megatron-core 0.16"),
        ("torch_cp", "torch 2.11"),
    ],
)
def test_every_adapter_asks_before_it_imports(module: str, library: str) -> None:
    """It runs in a process in which no library has a version, and none can be imported."""
    program = f"""
import importlib.metadata, sys
def missing(name): raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = missing
for name in ("transformers", "accelerate", "torchtitan", "megatron", "torch"):
    sys.modules[name] = None
import wlb.adapters.{module}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode
    assert f"this adapter needs {library} or later, which is not installed" in done.stderr
