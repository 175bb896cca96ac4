"""The audit log: who connected, who was refused, and what admins did, in fields that no client can forge."""

import logging
from pathlib import Path

import pytest

import streamingnode as sn
from streamingnode.errors import AccessDenied, AlreadyExists, Unauthenticated
from streamingnode.serve import audit_to
from tests.streamingnode.remote.nodes import SCHEMA
from tests.streamingnode.remote.proxy import until
from tests.streamingnode.remote.raw import raw_client
from tests.streamingnode.remote.test_auth import TOKENS, listening, token_file

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

AUDIT = "streamingnode.audit"


async def test_admin_calls_are_told_with_their_outcome_and_others_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, AUDIT)
    async with listening(token_file(tmp_path)) as (_, _, port):
        url = f"tcp://127.0.0.1:{port}"
        async with sn.connect(url, token=TOKENS["admin"]) as client:
            await client.create_collection("new", SCHEMA, primary_key="id")
            with pytest.raises(AlreadyExists):
                await client.create_collection("new", SCHEMA, primary_key="id")
            await client.statistics()
        async with sn.connect(url, token=TOKENS["reader"]) as client:
            with pytest.raises(AccessDenied):
                await client.flush()
        for token in (TOKENS["expired"], "a-token-that-nobody-knows"):
            with pytest.raises(Unauthenticated):
                await sn.connect(url, token=token, name="mallory")
    told = [record.getMessage() for record in caplog.records if record.name == AUDIT]
    assert told == [
        "event=client_connected client='admin' address=127.0.0.1",
        "event=admin_call client='admin' call=create_collection collection='new' outcome=done",
        "event=admin_call client='admin' call=create_collection collection='new' outcome=ALREADY_EXISTS",
        "event=client_connected client='reader' address=127.0.0.1",
        "event=admin_call client='reader' call=flush collection='*' outcome=ACCESS_DENIED",
        *["event=client_refused code=UNAUTHENTICATED client='mallory' address=127.0.0.1"] * 2,
    ]


@pytest.mark.parametrize(
    "name", ["eve\nevent=admin_call client='root'", "x' event=admin_call client='root", "\x1b[2J\u202e"]
)
async def test_no_client_forges_a_line_or_a_field_by_its_name(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, AUDIT)
    async with listening() as (_, _, port):
        async with raw_client(port) as client:
            await client.greet(name=name)
            client.call(1, "drop_collection", [name, False, None])
            assert (await client.error()).code == "COLLECTION_NOT_FOUND"
    told = [record.getMessage() for record in caplog.records if record.name == AUDIT]
    assert [line.split()[0] for line in told] == ["event=client_connected", "event=admin_call"]
    assert all(line.isprintable() for line in told)
    assert f"client={name!r} address=" in told[0], "it is one quoted value"
    assert f"collection={name!r} outcome=" in told[1]


async def test_connections_that_carry_something_else_are_told_with_their_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with listening() as (_, server, port):
        async with raw_client(port) as client:
            client.send(b"GET / HTTP/1.1\r\n\r\n")
            await client.ended()
        await until(lambda: not server.sessions)
    (told,) = [record.getMessage() for record in caplog.records if record.name == AUDIT]
    assert told.startswith("event=connection_refused address=127.0.0.1 error=")


async def test_the_file_is_for_its_owner_alone_and_is_added_to(tmp_path: Path) -> None:
    file, audit = tmp_path / "audit.log", logging.getLogger(AUDIT)
    file.write_text("before\n")
    file.chmod(0o600)
    before = list(audit.handlers)
    try:
        audit_to(file)
        audit_to(tmp_path / "new.log")
        async with listening() as (_, _, port), sn.connect(f"tcp://127.0.0.1:{port}", name="bob"):
            pass
    finally:
        for handler in set(audit.handlers) - set(before):
            audit.removeHandler(handler)
            handler.close()
    first, second = file.read_text().splitlines()
    assert first == "before"
    assert second.endswith("INFO event=client_connected client='bob' address=127.0.0.1")
    assert (tmp_path / "new.log").stat().st_mode & 0o777 == 0o600
