"""Errors that are printed as one line: errors that a user can fix, and interruptions of a run."""

MOST_CHARACTERS = 1000
"""Characters of the longest message. A value of megabytes would hide the remedy behind it."""
_END = 300


class UserError(ValueError):
    """Input that cannot work: a key, a file, an argument, a layout or a device.

    The message has the value and the remedy. Commands print it without a traceback, and leave out
    the middle of a very long one. Any other ValueError is a defect of wlb and keeps its traceback.
    """

    def __str__(self) -> str:
        return shortened(super().__str__())


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return `text`, without its middle if it has more than `most` characters."""
    if len(text) <= most:
        return text
    gap = " [...] "
    end = min(_END, most // 3)
    return text[: most - end - len(gap)] + gap + text[-end:]


class RunError(RuntimeError):
    """A run that cannot continue for a reason outside of wlb.

    Examples are a full disk, a folder that was removed, or a process that was stopped. As for a
    UserError, commands print the message without a traceback.
    """
