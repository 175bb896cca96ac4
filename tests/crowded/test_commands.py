"""Every command among the packages that users have: on a directory, and on a node that a service
has open.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.crowded.surroundings import environment, run
from tests.parsed_command import COMMANDS, named_by

pytestmark = pytest.mark.crowded

Owner = Callable[[Path], AbstractContextManager[None]]

ROWS = "".join(json.dumps({"id": number, "item": "tea"}) + "\n" for number in range(3))

ASKING = [
    "insert data orders - --create --primary-key id",
    "collection create data stock --schema id:int64,item:string --primary-key id",
    "insert data orders - --upsert",
    "collection ls data",
    "tail data orders --from earliest --limit 1",
    "partition create data orders eu",
    "partition ls data orders",
    "partition drop data orders eu",
    "collection drop data stock",
    "reader ls data",
    "txn ls data",
    "topic create data events",
    "topic ls data",
    "channel create data --role worker --address here:1",
    "channel ls data",
    "bridge data events orders --once",
    "topic info data events",
    "group ls data events",
    "group info data events bridge.events.orders",
    "group seek data events bridge.events.orders latest",
    "group rm data events bridge.events.orders",
    "topic rm data events",
    "info show data",
    "info top data --rounds 1 --interval 0.1",
    "check data",
    "flush data",
    "ingest data --tables tables",
    "verify data",
    "backup data OUT/backup",
    "export data OUT/rows",
    "bench --node data --seconds 0.1 --outstanding 1",
    "doctor data",
    "info config",
    "completion bash",
]
"""What runs on a closed directory, and beside a service, in this order."""

ALONE = [
    "restore OUT/backup restored",
    "bench --seconds 0.1 --outstanding 1",
    "demo --seconds 1 --dir demo",
]


OF_SOMEBODY_ELSE = {"reader seek", "reader rm", "txn abort", "channel rm"}
"""What needs a reader, a transaction or a name that another program made."""


def test_every_command_is_among_these() -> None:
    run = {named_by(each.split()) for each in (*ASKING, *ALONE, "serve data")}
    assert run == COMMANDS.keys() - OF_SOMEBODY_ELSE


@contextmanager
def nobody(_: Path) -> Iterator[None]:
    yield


@contextmanager
def a_service(directory: Path) -> Iterator[None]:
    """Have `streamingnode serve` own the node in a directory."""
    command = [sys.executable, "-m", "streamingnode", "serve", "data", "--json"]
    with subprocess.Popen(
        command, cwd=directory, env=environment(), stdout=subprocess.PIPE, text=True
    ) as service:
        try:
            assert service.stdout is not None
            assert json.loads(service.stdout.readline())["ready"]
            yield
        finally:
            service.terminate()
            assert service.wait(60) == 0


@pytest.mark.parametrize("owner", [nobody, a_service])
def test_every_command_ends_well(tmp_path: Path, owner: Owner) -> None:
    with owner(tmp_path):
        command(tmp_path, *ASKING)
    if owner is nobody:
        command(tmp_path, *ALONE)


def command(directory: Path, *lines: str) -> None:
    """Run commands, each as a process of its own."""
    for line in lines:
        given = ROWS if " - " in f"{line} " else ""
        run(
            "-m",
            "streamingnode",
            *line.replace("OUT", str(directory)).split(),
            cwd=directory,
            given=given,
        )
