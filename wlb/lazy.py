"""Packages whose public names are imported when they are first used (Scientific Python's SPEC 1).

The stub `__init__.pyi` beside a package's `__init__.py` says which file defines each public name.
Type checkers read the stub, and so does `attach` when the package is imported. `import wlb` thus
stays fast and imports no torch.
"""

import ast
import importlib
import sys
from pathlib import Path


def attach(room: str) -> None:
    """Add the names in a package's `__init__.pyi` to it, each imported on its first use.

    A public name must differ from the package's file names. Python sets an imported submodule as an
    attribute of its package, which would hide a function of the same name.

    Args:
        room: Import name of the package, such as "wlb.packing".
    """
    module = sys.modules[room]
    # Lines `from FILE import NAME as NAME` of the stub, as NAME -> FILE.
    stub = ast.parse(Path(str(module.__file__)).with_suffix(".pyi").read_text("utf-8"))
    file_of = {
        alias.name: str(node.module)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def get(name: str) -> object:
        if name not in file_of:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(file_of[name]), name)
        # Later uses find the value in the module and do not come here.
        setattr(module, name, value)
        return value

    names = {
        "__getattr__": get,
        "__dir__": lambda: sorted({*vars(module), *file_of}),
        "__all__": sorted(file_of),
    }
    vars(module).update(names)
