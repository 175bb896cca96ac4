"""The node without `async`, for notebooks and scripts: the same names, the same arguments, calls that block.

In: calls of any thread. Out: the same calls on an event loop in a thread of its own, which lives as long as the node is
open. Iterating fetches messages many at a time, because each hop between threads costs 50 us.

    with sn.sync.open_node("data") as node:
        node.insert("orders", [{"id": 1, "item": "tea"}])

In a notebook, `node = sn.sync.open_node("data")` in one cell and `node.close()` in another do the same. What is not written
here is as in the asynchronous class; `sync.pyi` spells all of it out for type checkers and editors.
"""

from functools import partial

from streamingnode import opening as asynchronous
from streamingnode.blocking import Blocking, BlockingLoop
from streamingnode.node import Node
from streamingnode.reading.reader import CollectionReader
from streamingnode.writing.producer import Producer
from streamingnode.writing.transaction import Transaction
from wal.errors import InvalidArgument


def open_node(path, *, config=None, config_file=None, observer=None, **settings):
    """Open a node, for a `with` block or until `close`; see `streamingnode.open_node`.

    An `observer` is called in the thread of the node's event loop.
    """
    opening = asynchronous.open_node(path, config=config, config_file=config_file, observer=observer, **settings)
    return open_blocking(opening)


def open_blocking(opening):
    """Open an asynchronous node on an event loop in another thread."""
    loop = BlockingLoop()
    return SyncNode(loop.enter(opening), loop)


class SyncNode(Blocking, of=Node, without=("aclose", "begin_closing")):
    """An open node; see `streamingnode.node.Node`. Any thread may call it."""

    def __repr__(self):
        return repr(self._original).replace("Node", "SyncNode", 1)

    def close(self):
        """Close the node, as the end of a `with` block does; idempotent. At the end of the program it happens by itself."""
        self._loop.close()

    def __enter__(self):
        self._loop.check_open()
        return self

    def __exit__(self, kind, error, traceback):
        self._loop.exit(kind, error, traceback)


class SyncTransaction(Blocking, of=Transaction, without=("state",)):
    """A transaction for a `with` block; see `streamingnode.writing.transaction.Transaction`."""

    def __enter__(self):
        self._call("__aenter__")
        return self

    def __exit__(self, kind, error, traceback):
        self._call("__aexit__", kind, error, traceback)


class SyncProducer(Blocking, of=Producer):
    """A named producer; see `Producer`. Any thread may call it."""

    @property
    def last_sequence(self):
        """See `Producer.last_sequence`."""
        return self._loop.call(getattr, self._original, "last_sequence")  # which looks at what appends change


class SyncReader(Blocking, of=CollectionReader, without=("close", "next_messages")):
    """A reader for a `with` block; see `CollectionReader`. One thread iterates at a time."""

    _entered = False

    def __enter__(self):
        self._call("__aenter__")
        self._entered = True
        return self

    def __exit__(self, kind, error, traceback):
        if not self._loop.is_closed:  # a closed node has ended its readers
            self._call("__aexit__", kind, error, traceback)

    def __iter__(self):
        self._check_entered()
        while messages := self._call("next_messages"):
            yield from messages

    def batches(self, *, max_rows=10_000, max_wait_s=0.1):
        """See `CollectionReader.batches`."""
        self._check_entered()
        batches = self._original.batches(max_rows=max_rows, max_wait_s=max_wait_s)
        while batch := self._loop.call(partial(anext, batches, [])):
            yield batch

    def ack(self, message):
        """See `CollectionReader.ack`."""
        self._check_entered()
        self._call("ack", message)

    def _check_entered(self):
        self._loop.check_open()
        if not self._entered:
            raise InvalidArgument("the reader is not open — use it inside `with node.read(...) as messages`")
