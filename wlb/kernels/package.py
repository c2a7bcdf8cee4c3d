"""Optional packages with GPU kernels: find them, check them, and import them when first used.

wlb runs without any of these packages. On import, the parameters of a package's functions are
compared with the arguments that we pass. If they differ, the package is refused with a message that
names its version.
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
"""A package's functions by name."""


class CalledFunction(Protocol):
    """A function of a package that we call, with the names of the arguments that we pass."""

    @property
    def name(self) -> str:
        """Name of the function in the package's module."""
        ...

    @property
    def passed(self) -> tuple[str, ...]:
        """Names of the arguments that we pass to the function."""
        ...


Called = TypeVar("Called", bound=CalledFunction)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPackage(Generic[Called]):
    """An optional package, and the functions of it that we call."""

    distribution: str  # name on the package index
    module: str  # module that has the functions
    supported: str  # package and version for which our calls were written
    install: str  # command that installs it, for messages
    functions: tuple[Called, ...]

    @property
    def installed(self) -> str:
        """Name and version of the installed package, for messages."""
        try:
            return f"{self.distribution} {metadata.version(self.distribution)}"
        except metadata.PackageNotFoundError:
            return f"{self.module} (version unknown)"

    def missing(self) -> str | None:
        """Return a message if the package is not installed, else None.

        The package is not imported for this, because an import takes seconds.
        """
        root = self.module.partition(".")[0]
        if root in sys.modules or util.find_spec(root) is not None:
            return None
        return self._not_installed()

    def problem(self) -> str | None:
        """Import the package; returns why its functions cannot be called, or None if they can."""
        try:
            self.load()
        except UserError as error:
            return str(error)
        return None

    def load(self) -> Kernels:
        """Import the package, and return its functions by name.

        Raises:
            UserError: The package is missing or broken, or its functions have other parameters.
        """
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            # The package is not installed if the missing module is this module or one of its
            # parents. (Another package may provide the parent.)
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
                    f"{self.installed} is not supported: the function "
                    f"{self.module}.{called.name} {problem}. Install the supported "
                    f"version {self.supported}"
                )
            kernels[called.name] = function
        return kernels

    def _not_installed(self) -> str:
        return f"the package {self.distribution} is not installed"

    def _broken(self, error: Exception) -> str:
        words = " ".join(str(error).split())
        return f"{self.installed} cannot be imported: {type(error).__name__}: {words}"


def _difference(function: Callable[..., Any], passed: Collection[str]) -> str:
    """Describe how a function's parameters differ from the arguments `passed`; "" if they fit."""
    required = _parameters(function)
    unknown = [name for name in passed if name not in required]
    lacking = [name for name, is_required in required.items() if is_required and name not in passed]
    words = ["does not have the parameters " + ", ".join(unknown)] if unknown else []
    words += ["requires the parameters " + ", ".join(lacking)] if lacking else []
    return " and ".join(words)


def _parameters(function: Callable[..., Any]) -> dict[str, bool]:
    """Return for each parameter of a function, by name, whether it is required."""
    # The Python signature of a torch custom op is (*args, **kwargs). Only its schema has the names
    # of parameters.
    op = getattr(function, "_opoverload", None)
    if op is not None:
        return {a.name: not a.has_default_value() for a in op._schema.arguments}
    return {
        p.name: p.default is p.empty
        for p in inspect.signature(function).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
