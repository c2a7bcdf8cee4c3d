"""Optional packages of kernels: finding, checking and importing them late.

A package is imported at first use, so wlb runs without any. The parameters of its functions are
compared with the arguments that we pass, and a package that differs is refused with its version.
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
"""Functions of a package by name."""


class CalledFunction(Protocol):
    """A function of a package, with the names of the arguments that we pass."""

    @property
    def name(self) -> str:
        """Name of the function in the module."""
        ...

    @property
    def passed(self) -> tuple[str, ...]:
        """Names of the arguments that we pass."""
        ...


Called = TypeVar("Called", bound=CalledFunction)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPackage(Generic[Called]):
    """A package and the functions of it that we call."""

    distribution: str  # name on the package index
    module: str  # module that has the functions
    supported: str  # package and version whose sources were read
    install: str  # command that installs it, for messages
    functions: tuple[Called, ...]

    @property
    def installed(self) -> str:
        """Name and version of the installed package."""
        try:
            return f"{self.distribution} {metadata.version(self.distribution)}"
        except metadata.PackageNotFoundError:
            return f"{self.module} (of no known version)"

    def missing(self) -> str | None:
        """Return why the package is not there, or None; does not import it, which takes seconds."""
        root = self.module.partition(".")[0]
        if root in sys.modules or util.find_spec(root) is not None:
            return None
        return self._not_installed()

    def problem(self) -> str | None:
        """Return why the package's functions cannot be called, or None."""
        try:
            self.load()
        except UserError as error:
            return str(error)
        return None

    def load(self) -> Kernels:
        """Import the package, and return its functions by name.

        Raises:
            UserError: The package is missing, broken or has other parameters.
        """
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            # The module itself or a parent is missing (another package may provide the parent).
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
    """Describe how the function's parameters differ from what we pass; empty if they do not."""
    required = _parameters(function)
    unknown = [name for name in passed if name not in required]
    lacking = [name for name, is_required in required.items() if is_required and name not in passed]
    words = ["does not take " + ", ".join(unknown)] if unknown else []
    words += ["asks for " + ", ".join(lacking)] if lacking else []
    return " and ".join(words)


def _parameters(function: Callable[..., Any]) -> dict[str, bool]:
    """Return whether each parameter is required, by name."""
    # The Python signature of a torch custom op is (*args, **kwargs); only its schema has names.
    op = getattr(function, "_opoverload", None)
    if op is not None:
        return {a.name: not a.has_default_value() for a in op._schema.arguments}
    return {
        p.name: p.default is p.empty
        for p in inspect.signature(function).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
