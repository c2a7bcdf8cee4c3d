"""A text file that a run appends to. A full disk costs lines, not the run."""

import sys
from pathlib import Path


class AppendedFile:
    """A file that passes each text to the operating system before `write` returns.

    A text that cannot be written is dropped. The first one is reported on stderr.

    Attributes:
        num_lost: Texts that were dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_lost = 0
        # Unbuffered: a buffer would keep text that could not be written, and fail once more at
        # close.
        self._file = path.open("ab", buffering=0)
        self._is_torn = False

    def write(self, text: str) -> bool:
        """Write a text, after ending a line that an earlier failure left incomplete.

        Returns:
            Whether the text was written completely.
        """
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
        """Count a text that could not be written, and report the first one."""
        self.num_lost += 1
        if self.num_lost == 1:
            # Not sys.stderr, which may copy what is written to this very file.
            stream = sys.__stderr__ or sys.stderr
            stream.write(f"{self.path} cannot be written ({error}); training goes on without\n")
            stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
