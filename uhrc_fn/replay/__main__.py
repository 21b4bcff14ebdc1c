"""Entry point of `python -m uhrc_fn.replay`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
