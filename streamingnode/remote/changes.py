"""The changes that a client requests: each is made once, even if the client requests it over
several connections.

A change is identified by the number of its call; a client uses each number once. It goes on when
its connection is lost. Its encoded reply is kept until the client confirms it, so a repeated number
gets the first reply.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple

from streamingnode.remote.answers import Rights
from wal.errors import Indeterminate
from wal.wire_types import WireError

REPLIES_MAX = 1_024
REPLIES_BYTES_MAX = 256 << 10
"""Limits for the kept replies of one client; the oldest are dropped first."""
LEFT_S_MAX = 600.0
"""How long the changes of a disconnected client go on and are remembered. A client repeats a
request for at most half as long (`remote.link.GIVE_UP_S_MAX`).
"""
LEFT_MAX = 1_024
"""The number of disconnected clients whose changes are remembered; those that left first are
forgotten first.
"""


class Reply(NamedTuple):
    """The answer to a call: an encoded reply, or an error."""

    payload: bytes = b""
    error: WireError | None = None


FORGOTTEN = Reply(
    error=WireError.of(Indeterminate("the node has forgotten the reply to this call"))
)
Answer = Callable[[int, Reply], Coroutine[Any, Any, None]]
"""Sends the reply to the call with this number."""
Start = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class ClientChanges:
    """The changes of one client with these `rights`; lives on the event loop."""

    def __init__(self, rights: Rights, start: Start) -> None:
        self.rights = rights
        self.memory = 1 + secrets.randbits(62)
        """Identifies this object: a client that gets the same value in a welcome can repeat its
        changes.
        """
        self.left_at: float | None = None
        """When the client lost its connection, by the loop's clock; None while it is connected."""
        self._start = start
        self._answer: Answer | None = None
        self._under_way: dict[int, asyncio.Task[None]] = {}
        self._replies: dict[int, Reply] = {}
        """Kept replies by number, in the order in which the changes ended."""
        self._replies_bytes = 0
        self._forgotten = 0
        """The highest number whose reply was dropped by the limits."""

    @property
    def under_way(self) -> int:
        """How many changes have begun and not ended."""
        return len(self._under_way)

    def attach(self, answer: Answer) -> None:
        """Send replies over another connection from now on."""
        self._answer = answer
        self.left_at = None

    def detach(self, answer: Answer, now: float) -> None:
        """Keep replies until the client has another connection, unless it has one already."""
        if self._answer is None or self._answer == answer:
            self._answer = None
            self.left_at = now if self.left_at is None else self.left_at

    def answer_again(self, number: int) -> bool:
        """Return whether a number belongs to an earlier change. Its reply is sent now, or when the
        change ends.
        """
        reply = self._replies.get(number)
        if reply is None and number in self._under_way:
            return True
        if reply is None and number <= self._forgotten:
            reply = FORGOTTEN
        if reply is None:
            return False
        self._send(number, reply)
        return True

    def begin(self, number: int, change: Callable[[], Awaitable[Reply]]) -> "asyncio.Task[None]":
        """Start a change that returns its reply; only `cancel` and `end` cancel it."""

        async def make() -> None:
            reply = await change()
            self._keep(number, reply)
            self._send(number, reply)

        task = self._under_way[number] = self._start(make())
        task.add_done_callback(lambda _: self._under_way.pop(number))
        return task

    def cancel(self, number: int) -> bool:
        """Cancel a change that the client no longer waits for; return whether it was running."""
        task = self._under_way.get(number)
        if task is None:
            return False
        task.cancel()
        return True

    def settle(self, number: int) -> None:
        """Drop the replies that the client has received: those of all numbers below this one."""
        while self._replies and next(iter(self._replies)) < number:
            self._forget_oldest()

    def end(self) -> None:
        """Cancel all changes and drop all replies."""
        for task in self._under_way.values():
            task.cancel()
        self._replies.clear()
        self._answer = None

    def _keep(self, number: int, reply: Reply) -> None:
        self._replies[number] = reply
        self._replies_bytes += len(reply.payload)
        while len(self._replies) > REPLIES_MAX or self._replies_bytes > REPLIES_BYTES_MAX:
            self._forgotten = max(self._forgotten, self._forget_oldest())

    def _forget_oldest(self) -> int:
        number = next(iter(self._replies))
        self._replies_bytes -= len(self._replies.pop(number).payload)
        return number

    def _send(self, number: int, reply: Reply) -> None:
        if self._answer is not None:
            self._start(self._answer(number, reply))


class Changes:
    """The changes of all clients of one node."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self.clients: dict[int, ClientChanges] = {}
        """The changes of each client, by client id."""

    def of(self, client_id: int, rights: Rights) -> ClientChanges:
        """Return the changes of a client that connects. Earlier changes are kept for a client with
        the same rights; otherwise they are cancelled.
        """
        known = self.clients.get(client_id)
        if known is not None and known.rights == rights:
            return known
        if known is not None:
            known.end()
        new = self.clients[client_id] = ClientChanges(rights, self._start)
        return new

    def forget_left(self, now: float) -> None:
        """End the changes of clients that have been disconnected for `LEFT_S_MAX`, and of those
        that left first beyond `LEFT_MAX`.
        """
        left = sorted(
            (changes.left_at, client_id)
            for client_id, changes in self.clients.items()
            if changes.left_at is not None
        )
        for number, (left_at, client_id) in enumerate(left):
            if number < len(left) - LEFT_MAX or left_at < now - LEFT_S_MAX:
                self.clients.pop(client_id).end()

    def end(self) -> None:
        """Cancel all changes."""
        for changes in self.clients.values():
            changes.end()
