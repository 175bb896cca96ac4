"""The service of `bench_service`: `python -m bench.service_app STORE DIRECTORY` serves it on
loopback and prints its port.

A FastAPI app under uvicorn with httptools and uvloop, as `uvicorn[standard]` is run. A POST of an
order inserts a row of 1 KiB into `orders` and upserts one into `stock`, and is answered once both
are committed, in one transaction.
"""

import argparse
import asyncio
import gc
import socket
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

BACKLOG = 1024
"""Connections that may wait to be accepted; more than any load opens at once."""


class Order(BaseModel):
    """The body of a POST: the key of the row in `orders`, that of the row in `stock`, and the value
    of both.
    """

    id: int
    item: int
    value: bytes


Commit = Callable[[Order], Awaitable[None]]
Store = Callable[[Path], AbstractAsyncContextManager[Commit]]


def make_app(store: Store, directory: Path, opened: Callable[[], None]) -> FastAPI:
    """Return the app; its store is open as long as it serves, and `opened` is called when it is."""
    commits: list[Commit] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with store(directory) as commit:
            commits.append(commit)
            gc.collect()
            gc.freeze()  # as docs/guide.md says, with every store
            opened()
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders", status_code=204)
    async def place(order: Order) -> None:
        await commits[0](order)

    return app


@asynccontextmanager
async def node_store(directory: Path) -> AsyncIterator[Commit]:
    """Keep orders in an embedded node, with the settings it has by itself."""
    from bench.rows import PRIMARY_KEY, SCHEMA
    from streamingnode.opening import open_node

    async with open_node(directory / "node") as node:
        for name in ("orders", "stock"):
            await node.create_collection(name, SCHEMA, primary_key=PRIMARY_KEY)

        async def commit(order: Order) -> None:
            async with node.transaction() as txn:
                await txn.insert("orders", [{"id": order.id, "value": order.value}])
                await txn.upsert("stock", [{"id": order.item, "value": order.value}])

        yield commit


@asynccontextmanager
async def sqlite_store(directory: Path) -> AsyncIterator[Commit]:
    """Keep orders in sqlite3, synced at each commit: one connection, in a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        connection = thread.submit(_connect, directory / "rows.db").result()
        loop = asyncio.get_running_loop()

        def transact(order: Order) -> None:
            with connection:
                connection.execute("INSERT INTO orders VALUES (?, ?)", (order.id, order.value))
                connection.execute(
                    "INSERT INTO stock VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET value = "
                    "excluded.value",
                    (order.item, order.value),
                )

        async def commit(order: Order) -> None:
            await loop.run_in_executor(thread, transact, order)

        try:
            yield commit
        finally:
            thread.submit(connection.close).result()


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, value BLOB)")
    connection.execute("CREATE TABLE stock (id INTEGER PRIMARY KEY, value BLOB)")
    connection.commit()
    return connection


@asynccontextmanager
async def no_store(_: Path) -> AsyncIterator[Commit]:
    """Keep nothing: what the service costs by itself."""

    async def commit(order: Order) -> None:
        pass

    yield commit


STORES: dict[str, Store] = {"node": node_store, "sqlite3": sqlite_store, "nothing": no_store}


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", choices=STORES)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    listening = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)

    def say_port() -> None:
        # who connects before uvicorn accepts waits in the backlog
        print(listening.getsockname()[1], flush=True)

    app = make_app(STORES[arguments.store], arguments.directory, say_port)
    config = uvicorn.Config(
        app, http="httptools", loop="uvloop", backlog=BACKLOG, log_level="warning", access_log=False
    )
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
