"""The command line. `main` is the console script; nothing heavy is loaded before one runs."""

from streamingnode.cli.program import main

__all__ = ["main"]
