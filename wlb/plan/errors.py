"""Errors that are told in one line: what a user can mend, and what ends a run from outside."""

MOST_CHARACTERS = 1000
"""Longest message; a value of megabytes would hide the remedy."""
_END = 300


class UserError(ValueError):
    """Input that cannot work: a key, a file, an argument, a layout or a device.

    The message has the value and the remedy, and commands print it without a traceback; the middle
    of a very long one is left out. Any other ValueError is a defect of wlb and keeps its traceback.
    """

    def __str__(self) -> str:
        return shortened(super().__str__())


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """`text`, without its middle if it has more than `most` characters."""
    if len(text) <= most:
        return text
    gap = " [...] "
    end = min(_END, most // 3)
    return text[: most - end - len(gap)] + gap + text[-end:]


class RunError(RuntimeError):
    """A run that cannot go on for a reason outside of wlb: a full disk, a folder that is gone, a
    process that was stopped. As of a UserError, the message is enough and no traceback is shown.
    """
