"""Executes single modules of other frameworks, without importing the whole framework.

Importing a framework would import Ray, vLLM and CUDA kernels, which its balancing does not need.
So one source file is taken from a wheel, a source tree or an installed package. While it is
executed, fake modules replace its imports; every attribute of a fake module is an empty class.
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
    """A framework is missing; the message is the command that gets it."""


class Empty(type):
    """Metaclass of empty classes, whose every attribute is another empty class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Empty(name, (), {})
        setattr(cls, name, made)
        return made


class Nothing(ModuleType):
    """Fake module whose every attribute is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = Empty(name, (), {})
        setattr(self, name, made)
        return made


class NoLogger:
    """Logger whose methods accept any arguments and do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@dataclass(frozen=True, slots=True)
class Sources:
    """Finds source files of packages in wheels and source trees of a folder, or as installed."""

    folder: Path | None  # None: only installed packages are searched

    def text(self, path: str, how: str) -> tuple[str, str]:
        """Returns the text of a file and the version of its package.

        Args:
            path: Path in the package, such as verl/utils/seqlen_balancing.py.
            how: Command that gets the package.

        Raises:
            Missing: If the file is not found.
        """
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
        """Executes a module and returns it with the version of its package.

        Args:
            path: Path in the package, such as verl/utils/seqlen_balancing.py.
            how: Command that gets the package.
            nothing: Names of modules that are replaced by fake ones during the execution.
            beside: Modules that replace imports, by name.

        Raises:
            Missing: If the file, or a module that it imports, is not found.
        """
        text, version = self.text(path, how)
        name = "fetched_" + path.removesuffix(".py").replace("/", "_")
        module = ModuleType(name)
        given: dict[str, Any] = {n: Nothing(n) for n in nothing} | (beside or {})
        before = {n: sys.modules.get(n) for n in (*given, name)}
        sys.modules.update(given)
        sys.modules[name] = module  # dataclasses look up the module that defines them
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
