"""Puts our functions in place of a host's, wherever the host has imported them, and back."""

import importlib
import sys
from collections.abc import Callable
from typing import Any


class Swap:
    """Replacements in the modules of one package, made by `install` and undone by `uninstall`.

    package: the host's name. functions: ours, by "module:name" of theirs. A module that cannot be
    imported here, such as a trainer in a process that only works for it, is left alone.
    """

    def __init__(self, package: str, functions: dict[str, Callable[..., Any]]) -> None:
        self.package, self.functions = package, functions
        self.theirs: dict[str, Any] = {}

    def install(self) -> None:
        """Replace; a second call does nothing more."""
        for place, ours in self.functions.items():
            module, name = place.split(":")
            try:
                found = getattr(importlib.import_module(module), name)
            except ImportError:
                continue
            if found is not ours:
                self.theirs[place] = found
                self._everywhere(found, ours)

    def uninstall(self) -> None:
        """Give the host its own functions back."""
        for place, theirs in self.theirs.items():
            self._everywhere(self.functions[place], theirs)
        self.theirs.clear()

    def _everywhere(self, old: Any, new: Any) -> None:
        for module_name, module in list(sys.modules.items()):
            if module_name == self.package or module_name.startswith(f"{self.package}."):
                for name, value in list(vars(module).items()):
                    if value is old:
                        setattr(module, name, new)
