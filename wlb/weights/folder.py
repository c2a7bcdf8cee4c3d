"""Create folders that are either complete or absent."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from wlb.data.store import temporary_name
from wlb.plan import UserError


def refuse_existing(out: Path) -> None:
    """UserError if `out` exists."""
    if out.exists():
        raise UserError(f"--out {out} exists already; remove it or give another folder")


@contextmanager
def new_folder(out: Path) -> Generator[Path]:
    """Give a temporary folder beside `out`, renamed to `out` at the end of the block; an exception
    removes it."""
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
