"""`python -m streamingnode`: the same as the console script."""

import sys

from streamingnode.cli import main

if __name__ == "__main__":
    sys.exit(main())
