"""The command line: one module per command parses options, calls the rooms and prints."""

from wlb.cli.main import main

__all__ = ["main"]
