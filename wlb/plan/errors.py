"""Errors that the user can correct."""


class UserError(ValueError):
    """Input that cannot work: a key, a file, an argument, a layout or a device.

    The message has the value and the remedy, and commands print it without a traceback. Any other
    ValueError is a defect of wlb and keeps its traceback.
    """
