"""Keeps a run's folder open, so that checkpoints are written to it even after it was renamed.

torch creates all parent folders of the files that it writes. If a run's folder was removed or
renamed, torch would create a new folder at the old path, or write into another run's folder that
now has this path.
"""

import os
import re
from pathlib import Path

from wlb.data.folder import open_folder
from wlb.plan import RunError

_DESCRIPTOR = re.compile(r"/proc/self/fd/\d+")


class HeldFolder:
    """A folder that this process keeps open, so that files can be written to it if it is renamed.

    Args:
        folder: Path of the folder.

    Attributes:
        name: The path by which the folder was opened.
        path: A path below /proc that leads to the folder in this process, even after it was
            renamed. If the folder was removed, no file can be created there.

    Raises:
        RunError: If the folder does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder
        try:
            self._descriptor = open_folder(folder)
        except FileNotFoundError:
            raise RunError(
                f"{folder}, the folder of this run, was removed or renamed before "
                "training began; start the run again"
            ) from None
        self.path = Path(f"/proc/self/fd/{self._descriptor}")

    def named(self, text: str) -> str:
        """Return `text`, a message, with each path like /proc/self/fd/7 replaced by the real path.

        The message may come from another rank, which has opened the folder with another number.
        """
        return _DESCRIPTOR.sub(lambda _: str(self.name), text)

    def close(self) -> None:
        """Close the folder. Further calls do nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
