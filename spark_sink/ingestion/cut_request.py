"""Asking the node for a cut, as a process of its own: the node's code never runs in a Spark driver."""

import subprocess
import sys
from pathlib import Path

import msgspec

from wal.errors import AlreadyOwned, CutFailed

CUT_TIMEOUT_S = 600.0
"""A node that recovers a full log first takes minutes, not more."""


class AnsweredCut(msgspec.Struct, frozen=True):
    """The newest cut as its node tells it; 0 when there is none. By its checksum it is told from one of another history."""

    number: int
    tick: int
    crc32c: int


def request_cut(node: Path) -> AnsweredCut | None:
    """Make a cut of everything acknowledged so far; return None when a running process owns the node, which makes its own.

    Raises `CutFailed` with what the node said.
    """
    command = [sys.executable, "-m", "streamingnode", "flush", str(node), "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CUT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CutFailed(f"no cut of {node} within {CUT_TIMEOUT_S:.0f} s — run: streamingnode flush {node}") from None
    if done.returncode == AlreadyOwned.exit_code:
        return None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or "nothing"
        raise CutFailed(
            f"cutting {node} ended with {done.returncode} and said: {said} — run: streamingnode flush {node}"
        )
    try:
        return msgspec.json.decode(done.stdout, type=AnsweredCut)
    except msgspec.DecodeError as error:
        raise CutFailed(f"cutting {node} answered what is no cut: {error} — run: streamingnode flush {node}") from error
