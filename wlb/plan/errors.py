"""The two errors that commands print as one line instead of a traceback: UserError and RunError."""

MOST_CHARACTERS = 1000
"""Most characters of an error message. A longer message loses its middle, because a quoted value of
megabytes would otherwise push the remedy at the end of the message out of sight."""
_END = 300  # characters at the end of a message that `shortened` leaves in place


class UserError(ValueError):
    """An error that the user can fix: a wrong configuration key, file, argument or device.

    The message says what value is wrong and what to do. Commands print it without a traceback. Any
    other ValueError is a bug in wlb and is printed with its traceback.
    """

    def __str__(self) -> str:
        return shortened(super().__str__())


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return `text`; if it has more than `most` characters, leave out its middle."""
    if len(text) <= most:
        return text
    gap = " [...] "
    end = min(_END, most // 3)
    return text[: most - end - len(gap)] + gap + text[-end:]


class RunError(RuntimeError):
    """A run cannot continue for a reason outside of wlb.

    Examples are a full disk, a removed folder or a stopped process. Commands print the message
    without a traceback.
    """
