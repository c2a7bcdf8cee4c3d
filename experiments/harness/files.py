"""Writes JSON files of results so that a crash never leaves half a file."""

import json
from pathlib import Path
from typing import Any

from wlb.prepare.files import write_text


def write_json(path: Path, value: Any, *, indent: int | None = None) -> None:
    """Writes a JSON file atomically: after a crash the old or the new file is there, whole."""
    write_text(path, json.dumps(value, indent=indent) + "\n")
