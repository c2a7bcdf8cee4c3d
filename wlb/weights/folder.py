"""Folders that are complete or absent."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from wlb.data.store import temporary_name


def refuse_existing(out: Path) -> None:
    """ValueError where something is at `out` already."""
    if out.exists():
        raise ValueError(f"--out {out} exists already; remove it or give another folder")


@contextmanager
def new_folder(out: Path) -> Generator[Path]:
    """A folder to fill, beside `out` under another name; leaving the block normally makes it `out`,
    leaving it by an exception leaves nothing."""
    refuse_existing(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = temporary_name(out)
    partial.mkdir()
    try:
        yield partial
        refuse_existing(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
