"""A text file to which a run appends lines, such as metrics.jsonl.

If the disk is full, lines are lost, but the run does not fail.
"""

import sys
from pathlib import Path


class AppendedFile:
    """A text file without a buffer, so that `write` passes each text to the operating system.

    A text that cannot be written is dropped. The first dropped text is reported on stderr.

    Attributes:
        num_lost: Number of texts that were dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_lost = 0
        # A buffer would keep text that could not be written, and closing the file would then raise
        # the same error again.
        self._file = path.open("ab", buffering=0)
        self._is_torn = False

    def write(self, text: str) -> bool:
        """Append a text. If an earlier call wrote only a part of its text, end that line first.

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
        """Count a text that could not be written because of `error`. Report only the first one."""
        self.num_lost += 1
        if self.num_lost == 1:
            # Use sys.__stderr__, because sys.stderr may be redirected to this very file.
            stream = sys.__stderr__ or sys.stderr
            stream.write(
                f"WARNING: {self.path} cannot be written ({error}); training continues, and what "
                "should be written to this file is lost until writing works again\n"
            )
            stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
