"""The audit log: who connected, who was refused, and what admins did, in fields that no client can
forge.
"""

import logging
import os
from collections import Counter
from pathlib import Path

import pytest

import streamingnode as sn
from streamingnode.errors import AccessDenied, AlreadyExists, Unauthenticated
from streamingnode.remote import audit as audit_module
from streamingnode.remote.audit import Audit, audit_to
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
        (
            "event=admin_call client='admin' call=create_collection collection='new' "
            "outcome=ALREADY_EXISTS"
        ),
        "event=client_connected client='reader' address=127.0.0.1",
        "event=admin_call client='reader' call=flush collection='*' outcome=ACCESS_DENIED",
        *["event=client_refused code=UNAUTHENTICATED client='mallory' address=127.0.0.1"] * 2,
    ]


@pytest.mark.parametrize(
    "name",
    ["eve\nevent=admin_call client='root'", "x' event=admin_call client='root", "\x1b[2J\u202e"],
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
    file = tmp_path / "audit.log"
    audit = logging.getLogger(AUDIT)
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


# --- bounds ---------------------------------------------------------------------------------------


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == AUDIT]


def test_whoever_reaches_the_port_adds_so_many_lines_a_second_and_one_of_what_was_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, AUDIT)
    now = [0.0]
    audit = Audit(lambda: now[0])
    for millisecond in range(3_000):
        now[0] = millisecond / 1_000
        audit.broken("192.0.2.1", ValueError("GET / HTTP/1.1"))
        audit.refused("UNAUTHENTICATED", "mallory", "192.0.2.1")
        audit.admin_call("mallory", "flush", "*", "ACCESS_DENIED")
        if millisecond % 1_000 == 999:  # at the end of a second full of refusals
            audit.admin_call("root", "flush", "*", "done")
            audit.connected("root", "192.0.2.2")
    audit.tell_left_out()
    audit.tell_left_out()
    told = Counter(line.split()[0].removeprefix("event=") for line in lines_of(caplog))
    refusals = 3 * audit_module.REFUSALS_PER_S
    assert told == {
        "connection_refused": refusals,
        "client_refused": refusals,
        "admin_call": refusals + 3,
        "client_connected": 3,
        "audit_left_out": 9,
    }
    left_out = [line for line in lines_of(caplog) if "audit_left_out" in line]
    assert left_out[0] == "event=audit_left_out lines=connection_refused count=990 within_s=1.0"
    assert all("count=990" in line for line in left_out), (
        "none is counted twice, and none forgotten"
    )


async def test_a_flood_of_connections_is_summed_up_while_it_lasts_and_when_the_server_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with listening() as (_, server, port):
        server.audit._clock = lambda: 0.0
        for _ in range(audit_module.REFUSALS_PER_S + 3):
            async with raw_client(port) as client:
                client.send(b"GET / HTTP/1.1\r\n\r\n")
                await client.ended()
            await until(lambda: not server.sessions)
        server.look()
        assert len(lines_of(caplog)) == audit_module.REFUSALS_PER_S + 1
        async with raw_client(port) as client:
            client.send(b"GET / HTTP/1.1\r\n\r\n")
            await client.ended()
        await until(lambda: not server.sessions)
    assert [line for line in lines_of(caplog) if "audit_left_out" in line] == [
        f"event=audit_left_out lines=connection_refused count={count} within_s=0.0"
        for count in (3, 1)
    ]


def test_the_files_together_are_bounded_and_each_is_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "FILE_BYTES_MAX", 1_000)
    monkeypatch.setattr(audit_module, "FILES_MAX", 3)
    audit = logging.getLogger(AUDIT)
    before = list(audit.handlers)
    mask = os.umask(0)
    try:
        audit_to(tmp_path / "audit.log")
        now = [0.0]
        said = Audit(lambda: now[0])
        for second in range(200):
            now[0] = float(second)
            said.connected(f"client {second}", "192.0.2.1")
    finally:
        os.umask(mask)
        for handler in set(audit.handlers) - set(before):
            audit.removeHandler(handler)
            handler.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["audit.log", "audit.log.1", "audit.log.2"]
    assert all(file.stat().st_size <= 1_000 for file in files)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    lines = "".join(file.read_text() for file in reversed(files)).splitlines()
    numbers = [int(line.split("client ")[1].split("'")[0]) for line in lines]
    assert numbers == [*range(numbers[0], 200)], "the newest, and none of them missing"
