"""`python -m lightning_hybridop` is `hybridop`."""

import sys

from lightning_hybridop.cli import main

if __name__ == "__main__":
    sys.exit(main())
