"""Replace functions of another library in all of its modules, and restore them."""

import importlib
import sys
from collections.abc import Callable
from typing import Any


class Swap:
    """Functions of a library and their replacements; `install` replaces and `uninstall` restores.

    Args:
        package: Import name of the library.
        functions: For each function to replace, as "module:name", its replacement. Functions of
            modules that cannot be imported in this process are skipped, for example a trainer in a
            worker process.
    """

    def __init__(self, package: str, functions: dict[str, Callable[..., Any]]) -> None:
        self.package, self.functions = package, functions
        self.theirs: dict[str, Any] = {}  # the library's original functions, by "module:name"

    def install(self) -> None:
        """Replace the functions given to the constructor. A second call changes nothing."""
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
        """Restore the original functions of the library."""
        for place, theirs in self.theirs.items():
            self._everywhere(self.functions[place], theirs)
        self.theirs.clear()

    def _everywhere(self, old: Any, new: Any) -> None:
        """Replace `old` by `new` in all loaded modules of the library, under every name."""
        for module_name, module in list(sys.modules.items()):
            if module_name == self.package or module_name.startswith(f"{self.package}."):
                for name, value in list(vars(module).items()):
                    if value is old:
                        setattr(module, name, new)
