"""Replace functions of another library wherever it has imported them, and restore them."""

import importlib
import sys
from collections.abc import Callable
from typing import Any


class Swap:
    """Replacements in the modules of one package, made by `install` and undone by `uninstall`.

    Args:
        package: Import name of the library.
        functions: The replacements by the "module:name" of the function that each replaces. A
            module that cannot be imported in this process is skipped, such as a trainer in a worker
            process.
    """

    def __init__(self, package: str, functions: dict[str, Callable[..., Any]]) -> None:
        self.package, self.functions = package, functions
        self.theirs: dict[str, Any] = {}  # the replaced functions, by "module:name"

    def install(self) -> None:
        """Replace the functions; a second call changes nothing."""
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
        """Restore the library's functions."""
        for place, theirs in self.theirs.items():
            self._everywhere(self.functions[place], theirs)
        self.theirs.clear()

    def _everywhere(self, old: Any, new: Any) -> None:
        """Replace `old` under every name that a loaded module of the package has for it."""
        for module_name, module in list(sys.modules.items()):
            if module_name == self.package or module_name.startswith(f"{self.package}."):
                for name, value in list(vars(module).items()):
                    if value is old:
                        setattr(module, name, new)
