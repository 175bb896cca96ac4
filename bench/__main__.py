"""`python -m bench [names]`: the benchmarks, each against its baseline in the same run."""

import argparse
import sys

from bench.registry import BENCHMARKS, LONG, run_all
from bench.report import add_settings, print_report, settings_of


def main() -> int:
    """Run what was named, everything but the long ones otherwise, and print the table and JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    default = [name for name in BENCHMARKS if name not in LONG]
    parser.add_argument(
        "names",
        nargs="*",
        help=f"of {', '.join(BENCHMARKS)} (default: {', '.join(default)})",
        metavar="name",
    )
    add_settings(parser)
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(
            f"no benchmark is named {', '.join(unknown)}: choose from {', '.join(BENCHMARKS)}"
        )
    measured = run_all(arguments.names or default, settings_of(arguments))
    print_report(arguments.dir, measured, json_only=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
