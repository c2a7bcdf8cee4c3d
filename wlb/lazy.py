"""Import the public names of a package only when they are first used (as in SPEC 1).

SPEC 1 is Scientific Python's convention for lazy loading.

The stub `__init__.pyi` beside a package's `__init__.py` says which file defines each public name.
Type checkers read the stub. `attach` reads it as well, when the package is imported. So `import
wlb` is fast and does not import torch.
"""

import ast
import importlib
import sys
from pathlib import Path


def attach(room: str) -> None:
    """Make the names in a package's `__init__.pyi` available; import each on its first use.

    A public name must differ from the names of the package's files. When Python imports a file, it
    sets the file's module as an attribute of the package, and this would hide the public name.

    Args:
        room: Import name of the package, such as "wlb.packing".
    """
    module = sys.modules[room]
    # The stub has lines `from FILE import NAME as NAME`; map each NAME to its FILE.
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
        # Store the value in the module, so that later uses do not call this function.
        setattr(module, name, value)
        return value

    names = {
        "__getattr__": get,
        "__dir__": lambda: sorted({*vars(module), *file_of}),
        "__all__": sorted(file_of),
    }
    vars(module).update(names)
