"""The command line. Each module parses the options of one command, runs it and prints."""

from wlb.cli.main import main

__all__ = ["main"]
