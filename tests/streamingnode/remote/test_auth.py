"""Who may connect, and do what: everything that is not allowed is refused, and no secret is told to
anybody.
"""

import asyncio
import hashlib
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

import streamingnode as sn
from streamingnode.errors import AccessDenied, InvalidArgument, Unauthenticated, Unreachable
from streamingnode.node import Node
from streamingnode.remote.answers import Rights
from streamingnode.remote.auth import Endpoint, Tokens, server_tls
from streamingnode.remote.calls import ReadCall
from streamingnode.remote.server import Server
from streamingnode.remote.streams import decode_batch
from tests.parts_of import parts_of
from tests.streamingnode.remote.nodes import SCHEMA, SETTINGS, contents, link_of, rows
from tests.streamingnode.remote.proxy import until
from tests.streamingnode.remote.raw import raw_client
from tests.streamingnode.remote.session_cases import INSERTS
from wal.address import LinkOptions, parse_address
from wal.entry import messages_of
from wal.errors import OnShutdown
from wal.frames import FrameKind
from wal.message import TransactionMessage
from wal.runtime import in_thread
from wal.wire import WireClient

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

TOKENS = {
    "reader": "reader-0123456789abcdef",
    "writer": "writer-0123456789abcdef",
    "admin": "admin-0123456789abcdefg",
    "expired": "expired-0123456789abcdef",
    "expires": "expires-0123456789abcdef",
}


def token_file(path: Path, mode: int = 0o600) -> Path:
    """Write a file of clients with different rights."""
    rights = {
        "reader": 'consume = ["c"]',
        "writer": 'produce = ["c"]\nconsume = ["c"]',
        "admin": 'admin = ["*"]\nproduce = ["*"]\nconsume = ["*"]',
        "expired": 'admin = ["*"]\nexpires = 2020-01-01T00:00:00Z',
        "expires": 'consume = ["*"]\nexpires = 2090-01-01T00:00:00Z',
    }
    text = "".join(
        f'[[client]]\nname = "{name}"\nsha256 = '
        f'"{hashlib.sha256(TOKENS[name].encode()).hexdigest()}"\n{each}\n'
        for name, each in rights.items()
    )
    file = path / "tokens.toml"
    file.write_text(text)
    file.chmod(mode)
    return file


@asynccontextmanager
async def listening(
    tokens: Path | None = None, tls: ssl.SSLContext | None = None, *, by_certificate: bool = False
) -> AsyncIterator[tuple[Node, Server, int]]:
    """Open a node with two collections that listens as it is told to."""
    known = None if tokens is None else Tokens.read(tokens)
    async with sn.open_node(None, **SETTINGS) as node:
        for name in ("c", "other"):
            await node.create_collection(name, SCHEMA, primary_key="id")
        server = Server(parts_of(node), connections_max=10)
        try:
            endpoint = Endpoint(parse_address("tcp://127.0.0.1:1"), known, tls, by_certificate)
            yield node, server, await server.listen_tcp("127.0.0.1", 0, endpoint.authenticate, tls)
        finally:
            await server.close()


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token",
    ["", "short", "reader-0123456789abcdeX", "x" * 5000, "\N{SNOWMAN}" * 16, TOKENS["expired"]],
)
async def test_who_has_no_valid_token_is_refused_and_told_no_secret(
    tmp_path: Path, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(token_file(tmp_path)) as (_, server, port):
        with pytest.raises(Unauthenticated) as refused:
            await sn.connect(f"tcp://127.0.0.1:{port}", token=token)
        await until(lambda: not server.sessions)
    said = f"{refused.value!r} {refused.value} {refused.value.fields()} {caplog.text}"
    assert not token or token not in said
    for known in TOKENS.values():
        assert known not in said
        assert hashlib.sha256(known.encode()).hexdigest() not in said


async def test_a_connection_ends_when_its_token_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamingnode.remote.server.SILENCE_LOOK_S", 0.01)
    async with listening(token_file(tmp_path)) as (_, server, port):
        async with sn.connect(f"tcp://127.0.0.1:{port}", token=TOKENS["expires"]) as client:
            await client.statistics()
            monkeypatch.setattr("streamingnode.remote.answers.time.time", lambda: 4e9)
            await until(lambda: not server.sessions)
            with pytest.raises(Unauthenticated):
                await client.statistics()


async def test_a_token_from_a_file_opens_what_it_is_for(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text(TOKENS["admin"] + "\n")
    async with listening(token_file(tmp_path)) as (_, _, port):
        async with sn.connect(f"tcp://127.0.0.1:{port}", token_file=tmp_path / "mine") as client:
            await client.create_collection("new", SCHEMA, primary_key="id")
            await client.insert("new", rows(1))
            await client.flush()
        with pytest.raises(InvalidArgument, match="cannot be read"):
            await sn.connect(f"tcp://127.0.0.1:{port}", token_file=tmp_path / "none")


async def test_a_token_that_was_replaced_in_its_file_is_taken_with_the_next_connection(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine"
    file.write_text(TOKENS["reader"])
    async with listening(token_file(tmp_path)) as (_, server, port):
        async with sn.connect(f"tcp://127.0.0.1:{port}", token_file=file) as client:
            with pytest.raises(AccessDenied):
                await client.insert("c", rows(1))
            file.write_text(TOKENS["writer"])
            for session in list(server.sessions):
                session.connection.abort(OnShutdown("the network"))
            await until(lambda: not server.sessions)
            await client.insert("c", rows(1))


async def test_a_reader_reads_its_collection_and_does_nothing_else(tmp_path: Path) -> None:
    async with listening(token_file(tmp_path)) as (node, _, port):
        await node.insert("c", rows(1))
        await node.insert("other", rows(2))
        async with sn.connect(f"tcp://127.0.0.1:{port}", token=TOKENS["reader"]) as client:
            assert await contents(client) == {1: "tea 1"}
            assert (await client.snapshot("c", keys=[1, 7])).num_rows == 1
            async with client.read("c") as messages:
                await anext(messages)
            for call in (
                client.insert("c", rows(3)),
                client.upsert("c", rows(3)),
                client.delete("c", [1]),
                client.producer("p"),
                client.create_collection("new", SCHEMA, primary_key="id"),
                client.drop_collection("c"),
                client.create_partition("c", "eu"),
                client.snapshot("other"),
                client.snapshot("other", keys=[2]),
                client.flush(),
                client.backup(tmp_path / "copy"),
                client.verify(),
                client.delete_reader("c", "x"),
                client.delete_producer("x"),
                client.read("other").__aenter__(),
                client.read(["c", "other"]).__aenter__(),
            ):
                with pytest.raises(AccessDenied):
                    await call
            large = client.transaction()
            with pytest.raises(AccessDenied):
                for key in range(10, 16):
                    await large.insert("c", [{"id": key, "item": "x" * 1_000_000}])
            await large.rollback()
        assert await contents(node) == {1: "tea 1"}
        assert not (tmp_path / "copy").exists()


async def test_a_reader_is_sent_no_row_of_another_collection_that_was_written_with_its_own(
    tmp_path: Path,
) -> None:
    async with listening(token_file(tmp_path)) as (node, _, port), raw_client(port) as client:
        # one that goes whole with its commit, and one that goes before it
        for count, size in ((1, 1), (6, 900_000)):
            async with node.transaction() as txn:
                for key in range(count):
                    await txn.insert("c", [{"id": 10 * count + key, "item": "x" * size}])
                    await txn.insert("other", [{"id": key, "item": f"secret {key}"}])
        (own,) = [info for info in parts_of(node).catalog.collections() if info.name == "c"]
        await client.greet(token=TOKENS["reader"])
        client.call(1, "read", ReadCall(own.id, "all", None, None, None, INSERTS, None, 1 << 30))
        sent = b""
        transactions = list[TransactionMessage]()
        while len(transactions) < 2:
            payload = memoryview(await client.payload(FrameKind.MESSAGES))
            sent += payload
            visible = decode_batch(payload, "memory").visible
            transactions += [
                each for each in messages_of(visible) if isinstance(each, TransactionMessage)
            ]
        assert [len(each.bodies) for each in transactions] == [1, 6]
        assert b"secret" not in sent
        (other,) = [info for info in parts_of(node).catalog.collections() if info.name == "other"]
        assert not any(vchannel.encode() in sent for vchannel in other.vchannels)


async def test_a_writer_writes_its_collection_and_no_other(tmp_path: Path) -> None:
    async with listening(token_file(tmp_path)) as (node, _, port):
        async with sn.connect(f"tcp://127.0.0.1:{port}", token=TOKENS["writer"]) as client:
            await client.insert("c", rows(1))
            producer = await client.producer("p")
            await producer.insert("c", rows(2))
            for call in (
                client.insert("other", rows(3)),
                producer.upsert("other", rows(3)),
                client.delete("other", [1]),
            ):
                with pytest.raises(AccessDenied):
                    await call
            mixed = client.transaction()
            await mixed.insert("c", rows(4))
            await mixed.insert("other", rows(4))
            with pytest.raises(AccessDenied):
                await mixed.commit()
            large = client.transaction()
            with pytest.raises(AccessDenied):
                for key in range(10, 16):
                    await large.insert("other", [{"id": key, "item": "x" * 1_000_000}])
            await large.rollback()
            await client.insert("c", rows(5))
        assert (await contents(node)).keys() == {1, 2, 5}
        assert await contents(node, "other") == {}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_token_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(InvalidArgument, match="chmod 600"):
        Tokens.read(token_file(tmp_path, mode))


@pytest.mark.parametrize(
    "text",
    ["[[client]]\nname = 1", "client = 5", "\xff", '[[client]]\nname="x"\nsha256="zz"', "a = "],
)
def test_a_token_file_that_is_none_is_refused_and_not_quoted(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text(text + "\n# a-secret-in-the-file", "latin-1")
    file.chmod(0o600)
    with pytest.raises(InvalidArgument) as refused:
        Tokens.read(file)
    assert "secret" not in str(refused.value)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        Tokens.read(tmp_path / "none")


def test_a_digest_that_is_none_is_refused_with_the_name_of_its_client(tmp_path: Path) -> None:
    file = token_file(tmp_path)
    file.write_text(
        file.read_text() + '[[client]]\nname = "newcomer"\nsha256 = "a-token-in-the-wrong-place"\n'
    )
    with pytest.raises(InvalidArgument, match="newcomer") as refused:
        Tokens.read(file)
    assert "wrong-place" not in str(refused.value)


async def test_reader_of_several_collections_is_moved_and_removed_by_who_may_change_all() -> None:
    rights = Rights("half", admin=frozenset({"c"}))
    async with sn.open_node(None, **SETTINGS) as node:
        for name in ("c", "other"):
            await node.create_collection(name, SCHEMA, primary_key="id")
            async with node.read(name, name="one"):
                pass
        async with node.read(["c", "other"], name="both"):
            pass
        server = Server(parts_of(node), connections_max=10)
        port = await server.listen_tcp("127.0.0.1", 0, lambda _hello, _connection: rights, None)
        try:
            async with sn.connect(f"tcp://127.0.0.1:{port}") as client:
                with pytest.raises(AccessDenied):
                    await client.seek_reader("c", "both", sn.DeliverPolicy.all())
                with pytest.raises(AccessDenied):
                    await client.delete_reader("c", "both")
                await client.seek_reader("c", "one", sn.DeliverPolicy.all())
                assert await client.delete_reader("c", "one")
        finally:
            await server.close()
        assert len(await node.readers()) == 2


# --- where to listen ------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.1", "example.org", "[::]"])
def test_an_address_of_other_machines_needs_tls_and_a_way_to_know_who_calls(
    tmp_path: Path, host: str
) -> None:
    tokens = token_file(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for url, file, context, client_ca in (
        (f"tcp://{host}:7000", None, None, False),
        (f"tcp://{host}:7000", tokens, None, False),
        (f"tcp://{host}:7000", tokens, tls, True),
        (f"tls://{host}:7000", None, tls, False),
        (f"tls://{host}:7000", tokens, None, False),
    ):
        with pytest.raises(InvalidArgument):
            Endpoint.of(url, tokens=file, tls=context, client_ca=client_ca)
    assert (
        Endpoint.of(f"tls://{host}:7000", tokens=tokens, tls=tls, client_ca=False).tokens
        is not None
    )
    assert Endpoint.of(f"tls://{host}:7000", tokens=None, tls=tls, client_ca=True).by_certificate


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.5.5.5"])
def test_an_address_of_this_machine_alone_needs_no_token(host: str) -> None:
    assert Endpoint.of(f"tcp://{host}:7000", tokens=None, tls=None, client_ca=False).tls is None


def test_an_address_is_shown_as_it_is_given() -> None:
    for url in ("tcp://[::1]:7000", "tls://example.org:1", "unix:/tmp/node.sock"):
        assert str(parse_address(url)) == url


# --- TLS ------------------------------------------------------------------------------------------


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with an authority, a node's certificate, a client's, and a stranger's."""
    place = tmp_path_factory.mktemp("tls")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    for name in ("ca", "stranger"):
        openssl(
            "req",
            "-x509",
            *curve,
            "-keyout",
            place / f"{name}.key",
            "-out",
            place / f"{name}.pem",
            "-subj",
            "/CN=x",
        )
    for name, extra in (
        ("node", "subjectAltName=IP:127.0.0.1"),
        ("client", "extendedKeyUsage=clientAuth"),
    ):
        key = place / f"{name}.key"
        request = place / f"{name}.csr"
        openssl("req", *curve[:-2], "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        (place / "extra").write_text(extra)
        signing = (
            "-CA",
            place / "ca.pem",
            "-CAkey",
            place / "ca.key",
            "-CAcreateserial",
            "-extfile",
            place / "extra",
        )
        openssl(
            "x509", "-req", "-in", request, "-days", "2", *signing, "-out", place / f"{name}.pem"
        )
    for key in place.glob("*.key"):
        key.chmod(0o600)
    return place


def client_tls(place: Path, ca: str = "ca", certificate: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=place / f"{ca}.pem")
    if certificate is not None:
        context.load_cert_chain(place / f"{certificate}.pem", place / f"{certificate}.key")
    return context


def node_tls(place: Path, *, client_ca: bool = False) -> ssl.SSLContext:
    context = server_tls(
        place / "node.pem", place / "node.key", place / "ca.pem" if client_ca else None
    )
    assert context is not None
    return context


async def test_a_client_reaches_a_node_over_tls_that_it_can_verify(
    certificates: Path, tmp_path: Path
) -> None:
    async with listening(token_file(tmp_path), node_tls(certificates)) as (_, _, port):
        url = f"tls://127.0.0.1:{port}"
        async with sn.connect(url, tls=client_tls(certificates), token=TOKENS["writer"]) as client:
            await client.insert("c", rows(1))
            assert await contents(client) == {1: "tea 1"}
        with pytest.raises(Unreachable):
            await sn.connect(
                url, tls=client_tls(certificates, ca="stranger"), token=TOKENS["writer"]
            )
        with pytest.raises(Unreachable):
            await sn.connect(url, token=TOKENS["writer"])  # of the system's authorities it is none


async def test_a_blocking_client_reaches_a_node_over_tls_with_its_token_and_its_rights(
    certificates: Path, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKENS['writer']}\n")

    def ask(port: int) -> None:
        url = parse_address(f"tls://127.0.0.1:{port}")
        tls = client_tls(certificates)
        with WireClient(url, LinkOptions(token=file, tls=tls)) as client:
            assert client.call("consistent_tick", timeout=10) > 0
            with pytest.raises(AccessDenied):
                client.call("flush", timeout=10)
        with pytest.raises(Unauthenticated):
            WireClient(url, LinkOptions(token="x" * 20, tls=tls))
        with pytest.raises(Unreachable, match="--tls-ca"):
            WireClient(url, LinkOptions(token=file))
        with pytest.raises(InvalidArgument, match="cannot be read"):
            WireClient(url, LinkOptions(token=tmp_path / "nowhere", tls=tls))

    async with listening(token_file(tmp_path), node_tls(certificates)) as (_, _, port):
        await in_thread(ask, port)


async def test_nothing_of_a_connection_over_tls_is_left_when_its_client_is_closed(
    certificates: Path, tmp_path: Path
) -> None:
    async with listening(token_file(tmp_path), node_tls(certificates)) as (_, _, port):
        async with sn.connect(
            f"tls://127.0.0.1:{port}", tls=client_tls(certificates), token=TOKENS["writer"]
        ) as client:
            connection = link_of(client)._connection
            assert connection is not None
            used = connection.peer("socket")
        assert used.fileno() == -1


async def test_with_a_client_authority_only_its_certificates_are_let_in(certificates: Path) -> None:
    async with listening(None, node_tls(certificates, client_ca=True), by_certificate=True) as (
        node,
        server,
        port,
    ):
        url = f"tls://127.0.0.1:{port}"
        async with sn.connect(url, tls=client_tls(certificates, certificate="client")) as client:
            await client.insert("c", rows(1))
            (session,) = server.sessions
            assert session.rights is not None
            assert session.rights.name == "client"
        for certificate in (None, "stranger"):
            with pytest.raises(Unreachable):
                await sn.connect(url, tls=client_tls(certificates, certificate=certificate))
        assert (await contents(node)).keys() == {1}


async def test_a_command_shows_its_certificate_and_verifies_that_of_the_node(
    certificates: Path,
) -> None:
    async with listening(None, node_tls(certificates, client_ca=True), by_certificate=True) as (
        _,
        _,
        port,
    ):
        command = [
            sys.executable,
            "-m",
            "streamingnode",
            "flush",
            "--node",
            f"tls://127.0.0.1:{port}",
        ]
        authority = ["--tls-ca", str(certificates / "ca.pem")]
        own = [
            "--tls-cert",
            str(certificates / "client.pem"),
            "--tls-key",
            str(certificates / "client.key"),
        ]
        for options, code in (
            (authority + own, 0),
            (authority, Unreachable.exit_code),
            (own, Unreachable.exit_code),
        ):
            done = await anyio.run_process(command + options, check=False)
            assert done.returncode == code, done.stderr
            assert (b"with tls= or --tls-ca" in done.stderr) is (options == own)


async def test_nothing_is_left_of_those_whose_handshake_failed(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # it is not the deadline that ends them
    monkeypatch.setattr("streamingnode.remote.server.HELLO_S_MAX", 600)
    async with listening(None, node_tls(certificates)) as (_, server, port):
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await reader.read()
            writer.close()
        await until(lambda: not server.sessions)


async def test_a_plain_client_is_refused_where_tls_is_spoken_and_the_other_way_round(
    certificates: Path,
) -> None:
    async with listening(None, node_tls(certificates)) as (_, _, port):
        with pytest.raises((Unreachable, sn.errors.ProtocolError)):
            await sn.connect(f"tcp://127.0.0.1:{port}")
    async with listening() as (_, server, port):
        with pytest.raises(Unreachable):
            await sn.connect(f"tls://127.0.0.1:{port}", tls=client_tls(certificates))
        await until(lambda: not server.sessions)


def test_a_key_that_others_may_read_and_half_of_a_pair_are_refused(
    certificates: Path, tmp_path: Path
) -> None:
    cert = certificates / "node.pem"
    key = certificates / "node.key"
    for given in ((cert, None), (None, key), (None, None)):
        with pytest.raises(InvalidArgument, match="both"):
            server_tls(given[0], given[1], certificates / "ca.pem")
    open_key = tmp_path / "open.key"
    open_key.write_bytes(key.read_bytes())
    open_key.chmod(0o644)
    with pytest.raises(InvalidArgument, match="chmod 600"):
        server_tls(cert, open_key, None)
    open_key.chmod(0o600)
    assert server_tls(cert, open_key, None) is not None
    with pytest.raises(InvalidArgument, match="correct them"):
        server_tls(cert, certificates / "stranger.key", None)
    assert server_tls(None, None, None) is None


def test_a_certificate_that_is_not_valid_now_is_refused(certificates: Path, tmp_path: Path) -> None:
    cert = tmp_path / "old.pem"
    key = certificates / "node.key"
    openssl(
        "x509",
        "-req",
        "-in",
        certificates / "node.csr",
        "-signkey",
        key,
        "-days",
        "-1",
        "-out",
        cert,
    )
    with pytest.raises(InvalidArgument, match="expired"):
        server_tls(cert, key, None)
    with pytest.raises(InvalidArgument, match="expired"):
        server_tls(cert, key, certificates / "ca.pem")


async def test_a_client_verifies_the_name_of_its_node_unless_its_context_says_otherwise(
    certificates: Path,
) -> None:
    async with listening(None, node_tls(certificates)) as (_, _, port):
        url = f"tls://localhost:{port}"  # the certificate is of 127.0.0.1
        with pytest.raises(Unreachable, match=r"[Hh]ostname"):
            await sn.connect(url, tls=client_tls(certificates))
        unverified = client_tls(certificates)
        unverified.check_hostname = False
        async with sn.connect(url, tls=unverified) as client:
            await client.insert("c", rows(1))


async def test_who_begins_no_handshake_is_dropped_by_the_deadline_for_a_hello(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamingnode.remote.server.HELLO_S_MAX", 0.1)
    async with listening(None, node_tls(certificates)) as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()
