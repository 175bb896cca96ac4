"""`python -m tests.chaos GATE [--minutes M | --count N] [--seed S]`: run a gate, print what was
tried and found, keep it.

A run of some minutes on a clean checkout adds a line to docs/reliability.jsonl and renders
docs/reliability.md again; `--count` alone does not, and is how a failing seed is started again.
"""

import argparse
import sys
from pathlib import Path

from tests.chaos.documents import write_documents
from tests.chaos.gate import Settings
from tests.chaos.registry import GATES
from tests.chaos.report import append_report, clean_commit, print_report


def main() -> int:
    """Run one gate; exit 0 when it passed, 1 when it failed, 2 when it cannot run here."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("gate", choices=GATES)
    parser.add_argument("--minutes", type=float, help="how long to go on")
    parser.add_argument("--count", type=int, help="how many tries, instead")
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        help="where to begin (default: chosen by the gate, mostly by chance, and printed)",
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        default=None,
        help="where directories are made (default: the system's)",
    )
    parser.add_argument("--no-report", action="store_true", help="keep no line of this run")
    arguments = parser.parse_args()
    gate = GATES[arguments.gate]
    if lack := gate.lacking():
        print(f"{gate.name} cannot run here: {lack}", file=sys.stderr)
        return 2
    seed = gate.first_seed() if arguments.seed is None else arguments.seed
    print(f"{gate.name}: seed {seed}", flush=True)
    commit = clean_commit()
    keep = arguments.minutes is not None and not arguments.no_report
    if keep and commit is None:
        print(f"{gate.name}: this run will not be kept: commit the changes first", file=sys.stderr)
    settings = Settings(
        seed=seed, count=arguments.count, minutes=arguments.minutes, scratch=arguments.scratch
    )
    report = gate.run(gate, settings)
    print_report(report)
    if keep and commit is not None and commit == clean_commit():  # nobody has changed it meanwhile
        append_report(report, commit)
        write_documents()
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
