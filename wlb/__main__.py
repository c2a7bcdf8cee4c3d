"""Run wlb's command line: `python -m wlb` does the same as `wlb`."""

import sys

from wlb.cli import main

if __name__ == "__main__":
    sys.exit(main())
