"""Generate text. `python generate.py --help` lists the flags; `fastea` is the same command when installed."""

import sys

from fastea.cli import main

if __name__ == "__main__":
    sys.exit(main())
