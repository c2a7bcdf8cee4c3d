"""Executes single modules of other frameworks, from packages or sources that the user has fetched.

Frameworks import Ray, vLLM and CUDA kernels when they are imported whole; their balancing needs
none of it. What a module imports beside it is replaced, while it is executed, by modules whose
names are empty classes.
"""

import importlib.util
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


class Missing(Exception):
    """Says that a framework is not there, and how to get it."""


class Empty(type):
    """The type of classes whose every name is another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Empty(name, (), {})
        setattr(cls, name, made)
        return made


class Nothing(ModuleType):
    """A module whose every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Empty(name, (), {})
        setattr(self, name, made)
        return made


class NoLogger:
    """Takes every call and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@dataclass(frozen=True, slots=True)
class Sources:
    """Finds files of packages in a folder of wheels and source trees, then among those installed.

    folder: None for installed packages only
    """

    folder: Path | None

    def text(self, path: str, how: str) -> tuple[str, str]:
        """Returns the source of `path` (verl/utils/x.py) and the version that it is of."""
        for wheel in sorted(self.folder.glob("*.whl")) if self.folder else []:
            with zipfile.ZipFile(wheel) as archive:
                found = [name for name in archive.namelist() if name.endswith(f"/{path}")]
                found += [path] * (path in archive.namelist())
                if found:
                    return archive.read(found[-1]).decode(), wheel.name.split("-")[1]
        for file in sorted(self.folder.glob(f"*/{path}")) if self.folder else []:
            return file.read_text("utf-8"), "source"
        package, _, rest = path.partition("/")
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            spec = None
        for root in (spec.submodule_search_locations or []) if spec else []:
            if (file := Path(root) / rest).exists():
                return file.read_text("utf-8"), _installed(package)
        raise Missing(how)

    def load(
        self,
        path: str,
        how: str,
        *,
        nothing: Sequence[str] = (),
        beside: dict[str, Any] | None = None,
    ) -> tuple[Any, str]:
        """Returns the executed module and its version.

        nothing: modules that are replaced by empty ones; beside: modules that are given
        """
        text, version = self.text(path, how)
        name = "fetched_" + path.removesuffix(".py").replace("/", "_")
        module = ModuleType(name)
        given: dict[str, Any] = {n: Nothing(n) for n in nothing} | (beside or {})
        before = {n: sys.modules.get(n) for n in (*given, name)}
        sys.modules.update(given)
        sys.modules[name] = module  # dataclasses look their module up
        try:
            exec(compile(text, path, "exec"), module.__dict__)
        except ImportError as error:
            raise Missing(f"{how} (it needs {error.name})") from None
        finally:
            for n, old in before.items():
                if old is None:
                    sys.modules.pop(n, None)
                else:
                    sys.modules[n] = old
        return module, version


def _installed(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "source"
