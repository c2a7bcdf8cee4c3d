"""Checks that the library an adapter needs is installed and recent enough; torch-free."""

import re
from importlib import metadata


def require(*needs: str) -> None:
    """ImportError with the remedy unless each "name>=version" is installed."""
    for need in needs:
        name, least = need.split(">=")
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise ImportError(
                f"this adapter needs {name} {least} or later, and none is installed: "
                f"pip install '{need}'"
            ) from None
        if _numbers(found) < _numbers(least):
            raise ImportError(
                f"this adapter needs {name} {least} or later, {found} is installed: "
                f"pip install '{need}'"
            )


def _numbers(version: str) -> tuple[int, ...]:
    """Numbers of the release: "5.23.0rc1" gives (5, 23, 0)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()
