"""A node directory with something in it, the program as a function, and a node as all the verbs may
find one.
"""

import hashlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.cli import main
from streamingnode.sync import SyncNode

Run = Callable[..., "Printed"]
HANGS_S = 60
WAYS = ("closed", "owned", "tcp")
TOKEN = "operator-0123456789"
COLUMNS: dict[str, pa.DataType] = {"id": pa.int64(), "item": pa.string()}
SCHEMA = pa.schema(COLUMNS)


class Printed:
    """What one run of the program left behind."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def document(self) -> dict[str, object]:
        """The one JSON document on stdout."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document

    @property
    def lines(self) -> list[dict[str, object]]:
        """The JSON lines on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the program with these arguments."""

    def run_program(*arguments: object) -> Printed:
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return Printed(code, printed.out, printed.err)

    return run_program


@pytest.fixture
def data(tmp_path: Path, run: Run) -> Path:
    """A node with the collection `orders` (two shards, three rows), made by the program itself."""
    rows = tmp_path / "orders.jsonl"
    rows.write_text(
        '{"id": 1, "item": "tea"}\n{"id": 2, "item": "milk"}\n{"id": 3, "item": "salt"}\n'
    )
    path = tmp_path / "data"
    made = run("insert", path, "orders", rows, "--create", "--primary-key", "id", "--shards", "2")
    assert made.code == 0, made.err
    return path


@dataclass(frozen=True)
class Place:
    """A node with a collection that no other test has: what names it on the command line, and who
    else opens it.
    """

    way: str
    arguments: tuple[str, ...]
    open: Callable[[], SyncNode]
    orders: str


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, Path]]:
    """A node that `serve` has open: its directory, its address, and a file with a token of somebody
    who may do all.
    """
    home = tmp_path_factory.mktemp("service")
    tokens = home / "tokens.toml"
    token = home / "token"
    everything = "".join(f'{right} = ["*"]\n' for right in ("consume", "produce", "admin"))
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    for file, text in (
        (tokens, f'[[client]]\nname = "op"\nsha256 = "{digest}"\n{everything}'),
        (token, TOKEN),
    ):
        file.touch(0o600)
        file.write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    served = [str(home / "data"), "--listen", url, "--tokens", str(tokens), "--json"]
    command = [sys.executable, "-m", "streamingnode", "serve", *served]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert url in process.stdout.readline()
            yield home / "data", url, token
        finally:
            process.terminate()
            assert process.wait(HANGS_S) == 0


@pytest.fixture(params=WAYS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A node that nobody has open, that a service has open, or at an address, with the collection
    `orders`.
    """
    orders = f"orders-{uuid4().hex[:8]}"
    if request.param == "closed":
        made = Place(
            request.param,
            (str(tmp_path / "data"),),
            lambda: sn.sync.open_node(tmp_path / "data"),
            orders,
        )
    else:
        directory, url, token = request.getfixturevalue("service")
        if request.param == "owned":
            made = Place(
                request.param,
                (str(directory),),
                lambda: sn.sync.connect(f"unix:{directory / 'node.sock'}"),
                orders,
            )
        else:
            arguments = ("--node", url, "--token-file", str(token))
            made = Place(
                request.param, arguments, lambda: sn.sync.connect(url, token_file=token), orders
            )
    with made.open() as node:
        node.create_collection(orders, SCHEMA, primary_key="id")
    return made
