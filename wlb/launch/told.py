"""Exceptions as ranks report them: in one line where that is enough."""

import traceback

from wlb.plan import RunError, UserError


def in_words(error: BaseException) -> tuple[str, str]:
    """An exception in one line without its notes, and its traceback, "" where the line is enough
    (RunError, UserError)."""
    if isinstance(error, RunError | UserError):
        return " ".join(str(error).split("\n")), ""
    line = traceback.format_exception_only(error)[0].strip()
    return line, "".join(traceback.format_exception(error))
