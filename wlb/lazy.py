"""Rooms whose names are imported when they are first used.

A room's `__init__.pyi` says which file each of its names is from. Type checkers read it, and so
does `attach` when the room is imported, as in Scientific Python's SPEC 1.
"""

import ast
import importlib
import sys
from pathlib import Path


def attach(room: str) -> None:
    """Give a package the names of the stub beside its `__init__.py`, each imported on first use.

    No name may be that of a file in the room: importing the file would put it in the name's place.
    """
    module = sys.modules[room]
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
        setattr(module, name, value)
        return value

    names = {
        "__getattr__": get,
        "__dir__": lambda: sorted({*vars(module), *file_of}),
        "__all__": sorted(file_of),
    }
    vars(module).update(names)
