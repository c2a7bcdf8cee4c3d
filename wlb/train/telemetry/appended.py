"""A text file that grows while a run trains, and does not end the run where the disk is full."""

import sys
from pathlib import Path


class AppendedFile:
    """Each text is with the operating system when `write` returns, so that killing the process
    loses none. Where that fails it is lost, which is said once on stderr; later texts are tried.

    num_lost: texts that were not written, or not wholly.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_lost = 0
        # Without a buffer: it would keep what could not be written, and fail again at its close.
        self._file = path.open("ab", buffering=0)
        self._is_torn = False

    def write(self, text: str) -> bool:
        """Whether it was written whole. What a failure left of a line is ended before."""
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
            # Not sys.stderr, which may be a `_Tee` to this very file.
            stream = sys.__stderr__ or sys.stderr
            stream.write(f"{self.path} cannot be written ({error}); training goes on without\n")
            stream.flush()

    def close(self) -> None:
        self._file.close()
