"""The command line: parse, call, print."""

from wlb.cli.main import main

__all__ = ["main"]
