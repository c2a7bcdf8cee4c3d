"""Run `wlb profile` as `python -m wlb.profile`."""

import sys

from wlb.cli import main

if __name__ == "__main__":
    sys.exit(main(["profile", *sys.argv[1:]]))
