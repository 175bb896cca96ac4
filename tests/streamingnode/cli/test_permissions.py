"""A node of another user, and one on a disk that may only be read: an error that says so, no
traceback and no damage.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import streamingnode as sn

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="root gives up its capabilities as Linux has them"
)

ROOT = Path(__file__).resolve().parents[3]
AS_ANYBODY = """
import contextlib, ctypes, io, json, sys
from streamingnode.cli import main

version_3, override, read_search = 0x20080522, 1 << 1, 1 << 2
header, sets = (ctypes.c_uint32 * 2)(version_3, 0), (ctypes.c_uint32 * 6)()
libc = ctypes.CDLL(None)
assert libc.capget(header, sets) == 0
for at in range(3):  # root may read and write everything by these
    sets[at] &= ~(override | read_search)
assert libc.capset(header, sets) == 0
told = []
for arguments in json.loads(sys.argv[1]):
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    told.append([code, out.getvalue() + err.getvalue()])
print(json.dumps(told))
"""


def as_anybody(*commands: list[object]) -> list[tuple[int, str]]:
    """Run commands as a user who may do no more than the modes of files say; return how each ended
    and what it said.
    """
    given = json.dumps([list(map(str, command)) for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", AS_ANYBODY, given],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(code, text) for code, text in json.loads(done.stdout)]


def test_a_node_that_may_not_be_entered_is_an_error_of_permission_for_every_verb(
    data: Path, tmp_path: Path
) -> None:
    commands: list[list[object]] = [
        ["collection", "ls", data],
        ["tail", data, "orders"],
        ["info", "show", data],
        ["flush", data],
        ["insert", data, "orders", tmp_path / "orders.jsonl"],
        ["insert", data, "new", tmp_path / "orders.jsonl", "--create", "--primary-key", "id"],
        ["verify", data],
        ["export", data, tmp_path / "rows"],
        ["backup", data, tmp_path / "backup"],
        ["serve", data],
        ["info", "top", data],
        ["bench", "--dir", data],
        ["check", data],
    ]
    data.chmod(0)
    try:
        *others, (code, said) = as_anybody(*commands)
    finally:
        data.chmod(0o700)
    for command, (exit_code, text) in zip(commands, others, strict=False):
        assert (exit_code, text.split(":")[0]) == (1, "STORAGE_FAILED"), (command, text)
        assert "Permission denied" in text
    assert (code, said.split(":")[0]) == (2, "CRITICAL"), said
    assert "Permission denied" in said


def test_a_node_that_may_only_be_read_is_not_called_damaged(data: Path, tmp_path: Path) -> None:
    log = data / "log"
    log.chmod(0o500)
    try:
        done = as_anybody(["verify", data], ["export", data, tmp_path / "rows"])
    finally:
        log.chmod(0o700)
    assert [code for code, _ in done] == [1, 1]
    for _, text in done:
        assert f"STORAGE_FAILED: {log} cannot be written, which reading requires" in text
    assert not (tmp_path / "rows").exists()


def test_a_socket_that_may_not_be_used_is_no_node_that_is_down(data: Path) -> None:
    with sn.sync.open_node(data):
        socket = data / "node.sock"
        socket.chmod(0)
        [(code, text)] = as_anybody(["collection", "ls", socket])
    assert code == 4
    assert text.endswith(
        "Permission denied — connect as the user who runs the node, or where it listens for "
        "others\n"
    )
