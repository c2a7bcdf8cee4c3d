"""The folder of a run by its inode, whatever becomes of its name.

torch makes all parents of what it writes to. By the name of a run's folder that was removed or
renamed, a save would bring that name back, or end up in another run that has it now.
"""

import os
import re
from pathlib import Path

from wlb.data.lock import open_folder
from wlb.plan import RunError

_DESCRIPTOR = re.compile(r"/proc/self/fd/\d+")


class HeldFolder:
    """A folder that stays open. path: leads to it in this process, also after it was renamed; in
    one that was removed nothing can be made any more. RunError if it is not there."""

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
        """`text` with the name that the folder had instead of `path`, be it that of another
        rank."""
        return _DESCRIPTOR.sub(lambda _: str(self.name), text)

    def close(self) -> None:
        """Let go of it; may be called again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
