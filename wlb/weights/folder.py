"""Create folders that are either complete or absent."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from wlb.data.folder import make_folder, refuse_nowhere
from wlb.data.store import temporary_name
from wlb.plan import UserError


def refuse_existing(out: Path) -> None:
    """UserError if `out` exists, or cannot be made."""
    # A link that leads nowhere is in the way as well.
    if os.path.lexists(out):
        raise UserError(f"--out {out} exists already; remove it or give another folder")
    refuse_nowhere(out.parent)


@contextmanager
def new_folder(out: Path) -> Generator[Path]:
    """Give a temporary folder beside `out`, renamed to `out` at the end of the block; an exception
    removes it.
    """
    refuse_existing(out)
    make_folder(out.parent)
    partial = temporary_name(out)
    partial.mkdir()
    try:
        yield partial
        refuse_existing(out)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
