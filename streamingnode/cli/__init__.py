"""The command line. `main` is the console script; one module per command, nothing heavy is loaded before one runs."""

from streamingnode.cli.program import main

__all__ = ["main"]
