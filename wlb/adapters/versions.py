"""Check that the library that an adapter needs is installed and recent enough."""

import re
from importlib import metadata


def require(*needs: str) -> None:
    """Raise ImportError with the pip command to run unless each requirement is installed.

    Args:
        *needs: Requirements in the form "name>=version".
    """
    for need in needs:
        name, least = need.split(">=")
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise ImportError(
                f"this adapter needs {name} {least} or later, which is not installed; run: pip "
                f"install '{need}'"
            ) from None
        if _numbers(found) < _numbers(least):
            raise ImportError(
                f"this adapter needs {name} {least} or later, but {found} is installed; run: pip "
                f"install '{need}'"
            )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without its suffix: "5.23.0rc1" gives (5, 23, 0)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()
