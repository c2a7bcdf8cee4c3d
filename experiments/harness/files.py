"""JSON files of results, which are complete or absent."""

import json
from pathlib import Path
from typing import Any

from wlb.prepare.files import write_text


def write_json(path: Path, value: Any, *, indent: int | None = None) -> None:
    """Writes JSON so that a process or a node that is lost leaves the old file or the new one."""
    write_text(path, json.dumps(value, indent=indent) + "\n")
