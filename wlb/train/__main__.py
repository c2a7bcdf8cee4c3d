"""Runs `wlb train` for `python -m wlb.train`."""

import sys

from wlb.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
