"""Holds the folder of a run by its inode, so that saves reach it whatever becomes of its name.

torch creates all parents of the files that it writes. After a run's folder was removed or renamed,
a save by name would create that name again, or end up in another run that has it now.
"""

import os
import re
from pathlib import Path

from wlb.data.folder import open_folder
from wlb.plan import RunError

_DESCRIPTOR = re.compile(r"/proc/self/fd/\d+")


class HeldFolder:
    """A folder that stays open. path: leads to it in this process, also after it was renamed; in
    one that was removed nothing can be made any more. RunError if it is not there.
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
        """`text` with the folder's name in place of `path`, which may be that of another rank's
        process.
        """
        return _DESCRIPTOR.sub(lambda _: str(self.name), text)

    def close(self) -> None:
        """Let go of it; may be called again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
