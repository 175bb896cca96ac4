"""A node that reopens its log and finds that another process has opened the database: it ends and
says so.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.failing_disk import FailingDisk
from tests.test_failed_write import HANGS_S, error_of, keys_of, opened, read_for_ever, row
from wal.errors import AlreadyOwned
from wal.rocks.opening import open_owned

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

HOLDER = """
import sys
from rocksdict import Options, Rdict
families = {"entries": Options(raw_mode=True)}
database = Rdict(sys.argv[1], Options(raw_mode=True), column_families=families)
print("open", flush=True)
sys.stdin.read()  # until it is killed
"""


async def test_node_ends_when_another_process_has_the_database_that_it_wants_to_open_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    holders: list[subprocess.Popen[str]] = []

    def taken_meanwhile(*given: Any, **options: Any) -> object:
        if not holders:
            command = [sys.executable, "-c", HOLDER, str(tmp_path / "log")]
            holders.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            assert holders[0].stdout is not None
            holders[0].stdout.readline()
        return open_owned(*given, **options)

    try:
        with (
            anyio.fail_after(HANGS_S),
            pytest.raises(AlreadyOwned, match="in use by another process"),
        ):
            async with opened(tmp_path) as node:
                await node.insert("a", [row(1)])
                monkeypatch.setattr("wal.rocks.store.open_owned", taken_meanwhile)
                disk.fail_at(1)
                await error_of(node.insert("a", [row(2)]))
                await read_for_ever(node)
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()
    async with opened(tmp_path) as node:
        assert 1 in await keys_of(node)
