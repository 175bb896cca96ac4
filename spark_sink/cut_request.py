"""Requests a cut from a node: an open node of the caller, a running one over its socket, a closed
one by a command.

For a closed node, the command `streamingnode flush` opens it in a process of its own. So a Spark
driver loads neither the node's log store nor its event loop, and a killed driver leaves no node
half open.
"""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import msgspec

from wal.address import SOCKET_NAME, LinkOptions, parse_address
from wal.errors import (
    AlreadyOwned,
    DeadlineExceeded,
    Indeterminate,
    InvalidArgument,
    OnShutdown,
    Overloaded,
    StorageFailed,
    Unreachable,
)
from wal.files import check_path
from wal.wire import WireClient

CUT_TIMEOUT_S = 600.0
"""A node that first recovers a full log takes minutes, not more."""


class AnsweredCut(msgspec.Struct, frozen=True):
    """The newest cut in the node's reply; number 0 when there is none. The checksum distinguishes
    it from a cut of another history.
    """

    number: int
    tick: int
    crc32c: int


class CuttingNode(Protocol):
    """A node that is open in this process and that this thread may call: `streamingnode.sync` makes
    them.
    """

    @property
    def path(self) -> str | None:
        """The node's directory, None for a node in memory."""

    def flush(self) -> Any:
        """Make a cut of everything acknowledged so far, and return it; a node on an event loop
        returns a coroutine.

        Returns None when nothing was written since its last cut. Raises `AlreadyOwned` when another
        process has the node open and takes no clients.
        """


def node_directory(node: str | Path | CuttingNode, *, request_cut: bool) -> Path:
    """Return the directory of a node that is given by its path or as an open node.

    Raises `InvalidArgument` for an address, for a node in memory, for a node on an event loop when
    a cut is wanted, and for other objects.
    """
    if isinstance(node, str | Path):
        return check_path("node directory", node)
    if not callable(getattr(node, "flush", None)) or not hasattr(node, "path"):
        raise InvalidArgument(
            f"node={node!r} is no node — pass its directory, or a node from sn.sync.open_node()"
        )
    if node.path is None:
        raise InvalidArgument("a node in memory has no files to ingest — open it with a directory")
    if request_cut and inspect.iscoroutinefunction(node.flush):
        raise InvalidArgument(
            "this node lives on an event loop, and an ingest blocks — `await node.flush()`, then "
            "`await asyncio.to_thread(spark_sink.ingest, spark, node, tables, request_cut=False)`"
        )
    return Path(node.path)


def request_cut(node: str | Path | CuttingNode) -> tuple[AnsweredCut | None, bool]:
    """Make a cut of everything acknowledged so far. Return it, and whether the cuts are stale.

    They are stale when a process owns the node and takes no clients, so that it cannot be asked for
    a cut. The returned cut is then None; cuts that the process makes by itself may exist. Raises
    `Overloaded` when the cut took too long, `StorageFailed` with the output of the command for a
    closed node; an open or running node raises what its `flush` raises.
    """
    if not isinstance(node, str | Path):
        try:
            return msgspec.convert(node.flush(), AnsweredCut | None, from_attributes=True), False
        except AlreadyOwned:
            return None, True
    try:
        return _ask_running(Path(node)), False
    except DeadlineExceeded:
        raise Overloaded(
            f"no cut of {node} within {CUT_TIMEOUT_S:.0f} s — run: streamingnode flush {node}"
        ) from None
    except (Unreachable, OnShutdown, Indeterminate):  # the node is closed or closing
        return _ask_command(Path(node))


def _ask_running(node: Path) -> AnsweredCut:
    address = parse_address(f"unix:{node / SOCKET_NAME}")
    with WireClient(address, LinkOptions(name="spark_sink")) as client:
        cut: AnsweredCut = client.call("flush", reply=AnsweredCut, timeout=CUT_TIMEOUT_S)
        return cut


def _ask_command(node: Path) -> tuple[AnsweredCut | None, bool]:
    command = [sys.executable, "-m", "streamingnode", "flush", str(node), "--json"]
    next_step = f"run: streamingnode flush {node}"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CUT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Overloaded(f"no cut of {node} within {CUT_TIMEOUT_S:.0f} s — {next_step}") from None
    if done.returncode == AlreadyOwned.exit_code:
        return None, True
    if done.returncode:
        output = (done.stderr or done.stdout).strip() or "nothing"
        raise StorageFailed(
            f"cutting {node} ended with {done.returncode} and said: {output} — {next_step}"
        )
    try:
        return msgspec.json.decode(done.stdout, type=AnsweredCut), False
    except msgspec.MsgspecError as error:
        raise StorageFailed(
            f"cutting {node} printed no valid cut: {error} — {next_step}"
        ) from error
