"""Alias of `wlb.adapters.collate` for code that imports the old path; kept for one release."""

import warnings
from types import ModuleType

from wlb.adapters import collate as _collate

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    name
    for name, value in vars(_collate).items()
    if not (name.startswith("_") or isinstance(value, ModuleType))
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'wlb.collate' has no attribute {name!r}")
    warnings.warn("wlb.collate is now wlb.adapters.collate", FutureWarning, stacklevel=2)
    return getattr(_collate, name)
