"""Entry point of `python -m uhrc_fn.serving`."""

import sys

from .demo.cli import main

if __name__ == "__main__":
    sys.exit(main())
