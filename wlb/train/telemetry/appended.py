"""A text file that a run appends to; a full disk costs lines, not the run."""

import sys
from pathlib import Path


class AppendedFile:
    """A file for whole texts, which are with the operating system when `write` returns.

    A text that cannot be written is dropped (num_lost), the first one with a message on stderr.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_lost = 0
        # The file is unbuffered, because a buffer would keep text that could not be written and
        # fail again at close.
        self._file = path.open("ab", buffering=0)
        self._is_torn = False

    def write(self, text: str) -> bool:
        """Whether the text was written completely. Ends a line that a failed write left first."""
        left = (("\n" if self._is_torn else "") + text).encode("utf-8", "replace")
        try:
            while left:
                written = self._file.write(left)
                self._is_torn = self._is_torn or bool(written)
                left = left[written:]
        except OSError as error:
            self._lose(error)
            return False
        self._is_torn = False
        return True

    def _lose(self, error: OSError) -> None:
        self.num_lost += 1
        if self.num_lost == 1:
            # sys.stderr may be a tee to this very file.
            stream = sys.__stderr__ or sys.stderr
            stream.write(f"{self.path} cannot be written ({error}); training goes on without\n")
            stream.flush()

    def close(self) -> None:
        self._file.close()
