"""The command line. `main` is the console script; heavy modules load only when a command runs."""

try:
    from streamingnode.cli.program import main
except KeyboardInterrupt:  # interrupted before the program could handle it
    raise SystemExit(130) from None

__all__ = ["main"]
