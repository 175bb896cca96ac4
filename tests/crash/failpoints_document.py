"""Writes the table of failpoints into docs/guarantees.md: `python -m tests.crash.failpoints_document`."""

from pathlib import Path

from wal.failpoint_table import FAILPOINTS

DOCUMENT = Path(__file__).parents[2] / "docs" / "guarantees.md"
BEGIN, END = "<!-- failpoints: begin -->", "<!-- failpoints: end -->"


def rendered() -> str:
    """Return the table between its marks."""
    rows = [f"| `{name}` | {leaves} |" for name, leaves in FAILPOINTS.items()]
    return "\n".join(
        [BEGIN, "", "| killed at | left behind; and what the next open makes of it |", "|---|---|", *rows, "", END]
    )


def main() -> None:
    """Replace what is between the marks."""
    text = DOCUMENT.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    assert rest, f"{DOCUMENT.name} has the mark {BEGIN}"
    DOCUMENT.write_text(before + rendered() + rest.partition(END)[2], "utf-8")


if __name__ == "__main__":
    main()
