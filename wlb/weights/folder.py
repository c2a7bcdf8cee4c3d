"""Create output folders that are either complete or absent."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from wlb.data.folder import make_folder, refuse_nowhere
from wlb.data.store import temporary_name
from wlb.plan import UserError


def refuse_existing(out: Path) -> None:
    """Raise UserError if `out` exists or cannot be created."""
    # A broken symbolic link counts as existing, too.
    if os.path.lexists(out):
        raise UserError(f"--out {out} already exists; remove it or give another folder")
    refuse_nowhere(out.parent)


@contextmanager
def new_folder(out: Path) -> Generator[Path]:
    """Yield a temporary folder beside `out`, which becomes `out` at the end of the block.

    If the block raises an exception, the temporary folder is removed.
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
