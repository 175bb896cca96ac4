"""The peer is asked for exactly what its replies are, and a server ends with who started it."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from bench import bench_remote
from bench.bench_remote import serving_node
from bench.redis_exchange import READ_COUNT, Exchange, entry_id, fill_redis, read_bytes
from bench.redis_streams import connected, lacking, serving, words
from bench.registry import BENCHMARKS
from bench.remote_server import READY
from bench.report import Settings
from wal.address import SOCKET_NAME

needs_peer = pytest.mark.skipif(bool(lacking()), reason=lacking())


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose name is short enough for a socket in a directory in it."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        yield Path(directory)


def test_a_served_node_is_measured_beside_the_peer(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_remote, "INSERTS", ((2, 1, 0.5, 0.0),))
    monkeypatch.setattr(bench_remote, "CHANGES", bench_remote.CHANGES[1:])
    monkeypatch.setattr(bench_remote, "READ_BATCHES", (100,))
    found = BENCHMARKS["remote"](Settings(directory=place, seconds=0.05, repeats=1, scale=0.02))
    cases = [measured.case for measured in found if "redis-py" not in measured.case]
    assert len(cases) == len(set(cases)) == 8
    for measured in found:
        assert measured.value > 0 or "growth" in measured.case or "log reads" in measured.case
        assert measured.baseline > 0 or measured.unit in {"times", "s", "MiB"} or lacking()
    assert not list(place.iterdir())


@needs_peer
def test_replies_of_the_peer_have_the_lengths_that_are_waited_for(place: Path) -> None:
    async def ask() -> None:
        with serving(place) as socket:
            await fill_redis(socket, 2 * READ_COUNT)
            async with connected(socket), Exchange.open(socket) as exchange:
                for count in (1, 3):
                    command = words(
                        b"XREAD", b"COUNT", b"%d" % count, b"STREAMS", b"rows", entry_id(7)
                    )
                    await exchange.ask(command, read_bytes(count))
                    assert exchange._left == 0
                with pytest.raises(ConnectionError, match="unknown command"):
                    await exchange.ask(words(b"NOTHING"), 1_000)

    anyio.run(ask)


def test_a_server_ends_at_the_end_of_its_input(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.remote_server", str(tmp_path / "node")]
    ended = subprocess.run(
        command, input="", capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout.startswith(READY)
    assert not (tmp_path / "node" / SOCKET_NAME).exists()


def test_a_node_that_does_not_open_is_named(place: Path) -> None:
    (place / "node").touch()
    with pytest.raises(ConnectionError, match="no node listens at"), serving_node(place / "node"):
        pass
