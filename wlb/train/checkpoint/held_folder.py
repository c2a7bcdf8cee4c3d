"""Keeps the folder of a run open, so that saves reach it even after it was renamed.

torch creates all parent folders of the files that it writes. If a run's folder was removed or
renamed, a save by path would create the path anew, or write into another run that now has this
name.
"""

import os
import re
from pathlib import Path

from wlb.data.folder import open_folder
from wlb.plan import RunError

_DESCRIPTOR = re.compile(r"/proc/self/fd/\d+")


class HeldFolder:
    """A folder that stays open. RunError if it does not exist.

    Attributes:
        name: The path by which it was opened.
        path: A path that leads to it in this process, also after it was renamed. If it was removed,
            no file can be created there.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder
        try:
            self._descriptor = open_folder(folder)
        except FileNotFoundError:
            raise RunError(
                f"{folder}, the folder of this run, was removed or renamed before training began"
            ) from None
        self.path = Path(f"/proc/self/fd/{self._descriptor}")

    def named(self, text: str) -> str:
        """Replace `path` by the folder's name in a text, for messages.

        The text may come from another rank, whose `path` has another number.
        """
        return _DESCRIPTOR.sub(lambda _: str(self.name), text)

    def close(self) -> None:
        """Close the folder. May be called repeatedly."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
