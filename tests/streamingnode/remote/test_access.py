"""Clients with rights to some collections: they are told of nothing else, and not refused what they
may do.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

import streamingnode as sn
from streamingnode.care.export import export_node
from streamingnode.errors import AccessDenied, Unauthenticated
from streamingnode.node import Node
from streamingnode.remote.answers import Rights
from streamingnode.remote.calls import Access
from streamingnode.remote.connection import Connection
from streamingnode.remote.server import Server
from streamingnode.streams.channels import OwnerDescription
from tests.parts_of import parts_of
from tests.streamingnode.remote.nodes import SCHEMA, SETTINGS, rows
from wal.errors import OnShutdown
from wal.wire_types import Hello

pytestmark = [pytest.mark.anyio, pytest.mark.may_block]

NOTHING = Rights("some", frozenset(), frozenset(), frozenset())


@asynccontextmanager
async def node_and_client(path: Path, *accesses: Access) -> AsyncIterator[tuple[Node, Node]]:
    """Open a node with collections and topics `c` and `other`, and a client with these rights to
    `c`.
    """
    async with sn.open_node(path, **SETTINGS) as node:
        for name in ("c", "other"):
            await node.create_collection(name, SCHEMA, primary_key="id")
            await node.insert(name, rows(1))
            await node.mq.create_topic(name)
            async with node.read(name, name=f"of-{name}"):
                pass
        server = Server(parts_of(node), connections_max=9)
        try:
            rights = msgspec.structs.replace(
                NOTHING, **{access.value: frozenset({"c"}) for access in accesses}
            )
            port = await server.listen_tcp("127.0.0.1", 0, lambda _hello, _connection: rights, None)
            async with sn.connect(f"tcp://127.0.0.1:{port}") as client:
                yield node, client
        finally:
            await server.close()


async def test_a_client_is_told_of_its_own_topics_readers_and_transactions_alone(
    tmp_path: Path,
) -> None:
    async with node_and_client(tmp_path, Access.CONSUME) as (node, client):
        (channel,) = await node.channels.create_channels(OwnerDescription("of others"), 1)
        txn_id = await node.begin_transaction()
        await node.insert("other", rows(2), txn_id=txn_id)
        assert (await client.mq.info()).keys() == (await client.statistics()).topics.keys() == {"c"}
        assert [each.name for each in await client.readers()] == ["of-c"]
        assert not await client.transactions()
        describe = client.channels.describe_channels
        for call in (describe(), describe([channel]), client.consistent_tick(["c", "other"])):
            with pytest.raises(AccessDenied):
                await call
        assert await client.consistent_tick(["c"]) < await client.consistent_tick()
        assert len(await node.readers()) == len(await node.mq.info()) - 1 == 2
        assert len(await node.transactions()) == 1


@pytest.mark.parametrize("access", [Access.PRODUCE, Access.ADMIN])
async def test_a_client_that_may_not_read_sees_no_counts(tmp_path: Path, access: Access) -> None:
    async with node_and_client(tmp_path, access) as (_, client):
        for call in (client.mq.info, client.statistics, client.readers, client.transactions):
            with pytest.raises(AccessDenied):
                await call()


async def test_a_write_of_no_rows_takes_the_right_to_no_more_than_other_writes(
    tmp_path: Path,
) -> None:
    async with node_and_client(tmp_path, Access.PRODUCE) as (_, client):
        told = await client.insert("c", rows(2))
        assert (await client.insert("c", [])).time_tick >= told.time_tick
        async with client.transaction() as txn:
            pass
        assert txn.result is not None


async def test_an_export_by_who_may_not_read_all_of_it_is_refused_by_name_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    (building := tmp_path / "building").mkdir()
    async with node_and_client(tmp_path / "data", Access.CONSUME) as (_, client):
        with pytest.raises(AccessDenied, match="consume other"):
            await export_node(client, tmp_path / "out", building)
    assert not (tmp_path / "out").exists()


async def test_a_client_that_is_not_let_in_again_is_told_so_at_each_call(tmp_path: Path) -> None:
    async with sn.open_node(tmp_path, **SETTINGS) as node:
        server = Server(parts_of(node), connections_max=9)
        may_enter = [True]

        def authenticate(hello: Hello, _: Connection) -> Rights:
            if not may_enter:
                raise Unauthenticated("the token has expired")
            return Rights(hello.name)

        try:
            port = await server.listen_tcp("127.0.0.1", 0, authenticate, None)
            async with sn.connect(f"tcp://127.0.0.1:{port}") as client:
                may_enter.clear()
                for session in server.sessions:
                    session.connection.abort(OnShutdown("the network"))
                for _ in range(2):
                    with pytest.raises(Unauthenticated):
                        await client.consistent_tick()
        finally:
            await server.close()
