"""Optional packages of kernels: finding, checking and late import.

A package is imported at first use, so that wlb runs without any. The parameters of its functions
are compared with what we pass, and a package that differs is refused by version.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import metadata, util
from typing import Any, Generic, Protocol, TypeVar

from wlb.plan import UserError

Kernels = dict[str, Callable[..., Any]]


class CalledFunction(Protocol):
    """A function of a package, with the names of the arguments that it is called with."""

    @property
    def name(self) -> str: ...
    @property
    def passed(self) -> tuple[str, ...]: ...


Called = TypeVar("Called", bound=CalledFunction)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPackage(Generic[Called]):
    """A package with the functions that we call, as read in the version `supported`."""

    distribution: str
    module: str
    supported: str
    install: str
    functions: tuple[Called, ...]

    @property
    def installed(self) -> str:
        try:
            return f"{self.distribution} {metadata.version(self.distribution)}"
        except metadata.PackageNotFoundError:
            return f"{self.module} (of no known version)"

    def missing(self) -> str | None:
        """Why the package cannot be here, found without importing it (which takes seconds)."""
        root = self.module.partition(".")[0]
        if root in sys.modules or util.find_spec(root) is not None:
            return None
        return self._not_installed()

    def problem(self) -> str | None:
        """Why its functions cannot be called, in words; None if they can."""
        try:
            self.load()
        except UserError as error:
            return str(error)
        return None

    def load(self) -> Kernels:
        """The functions by name; UserError if the package is missing, broken or different."""
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            # Another package may provide the parent module, but this one is still missing.
            if error.name and (self.module + ".").startswith(error.name + "."):
                raise UserError(self._not_installed()) from error
            raise UserError(self._broken(error)) from error
        except (ImportError, OSError, AttributeError, RuntimeError, TypeError) as error:
            raise UserError(self._broken(error)) from error
        kernels: Kernels = {}
        for called in self.functions:
            function = getattr(module, called.name, None)
            problem = "is missing" if function is None else _difference(function, called.passed)
            if function is None or problem:
                raise UserError(
                    f"{self.installed} is not supported: {self.module}.{called.name} {problem}; "
                    f"supported is {self.supported}"
                )
            kernels[called.name] = function
        return kernels

    def _not_installed(self) -> str:
        return f"package {self.distribution} is not installed"

    def _broken(self, error: Exception) -> str:
        words = " ".join(str(error).split())
        return f"{self.installed} can't be imported: {type(error).__name__}: {words}"


def _difference(function: Callable[..., Any], passed: Collection[str]) -> str:
    """How the function's parameters differ from what we pass; empty if they do not."""
    required = _parameters(function)
    unknown = [name for name in passed if name not in required]
    lacking = [name for name, is_required in required.items() if is_required and name not in passed]
    words = ["does not take " + ", ".join(unknown)] if unknown else []
    words += ["asks for " + ", ".join(lacking)] if lacking else []
    return " and ".join(words)


def _parameters(function: Callable[..., Any]) -> dict[str, bool]:
    """Whether each parameter is required, by name."""
    # A torch custom op's Python signature is (*args, **kwargs); its schema has the names.
    op = getattr(function, "_opoverload", None)
    if op is not None:
        return {a.name: not a.has_default_value() for a in op._schema.arguments}
    return {
        p.name: p.default is p.empty
        for p in inspect.signature(function).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
