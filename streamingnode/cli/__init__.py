"""The command line. `main` is the console script; nothing heavy is loaded before one runs."""

try:
    from streamingnode.cli.program import main
except KeyboardInterrupt:  # before there is a program that could say so
    raise SystemExit(130) from None

__all__ = ["main"]
