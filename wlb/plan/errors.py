"""Errors that the user can correct."""


class UserError(ValueError):
    """Input that cannot work: a key, a file, an argument, a layout or a device.

    The message has the value and the remedy, and commands print it without a traceback. Any other
    ValueError is a defect of wlb and keeps its traceback.
    """


class RunError(RuntimeError):
    """A run that cannot go on for a reason outside of wlb: a full disk, a folder that is gone, a
    process that was stopped. As of a UserError, the message is enough and no traceback is shown.
    """
