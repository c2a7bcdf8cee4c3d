"""Provides stand-ins for frameworks that cannot be installed in one environment.

A stand-in is a package on sys.path with a version and with the functions that an adapter uses. They
have the signatures of the framework's functions and the shortest possible bodies.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

StandIn = Callable[[str, str, dict[str, str]], None]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Returns the function make(distribution, version, {module path: source}).

    After the test, the stand-ins and the adapters that imported them are removed from sys.modules.
    """
    before = set(sys.modules)

    def make(distribution: str, version: str, modules: dict[str, str]) -> None:
        folder = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        for path, source in modules.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield make
    for name in set(sys.modules) - before:
        root = name.split(".")[0]
        if (tmp_path / root).exists() or name.startswith("wlb.adapters."):
            sys.modules.pop(name, None)
