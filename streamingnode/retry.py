"""Sends a write again until its outcome is known: exact, because the log recognises it by its stamp.

In come append groups of the node's callers: inserts that were put together, single writes, transactions, schema changes.
What has no stamp of a named producer is the node's own next write. Out goes the group's one result, or an error that says
what is true: when a first try may have reached the log and no later one could find out, the error stays `Indeterminate`,
whatever the last try met. A refusal that comes from behind the log's window is an answer: the window would have known of a
first try that happened.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio

from interceptors.errors import ProducerFenced, SequenceTooOld
from streamingnode.errors import LogReopening
from wal.errors import ChannelFenced, Indeterminate, OnShutdown, StorageFailed, StorageFull, StreamingNodeError
from wal.headers import Header
from wal.log import Append, AppendGroup, AppendResult
from wal.message import MutableMessage
from wal.position import NODE_PRODUCER_ID, ProducerStamp

UNANSWERED = (OnShutdown, ChannelFenced, LogReopening, StorageFailed, StorageFull, ProducerFenced, SequenceTooOld)
"""Refusals that come before, or from, the window: they say nothing about an earlier try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLimits:
    """How a write with an open outcome is repeated: after `first_s` seconds, twice as long each time up to `max_s`.

    After `give_up_s` in all the caller hears `Indeterminate`, sooner when its own timeout ends; 0 repeats nothing.
    """

    first_s: float = 0.02
    max_s: float = 1.0
    give_up_s: float = 30.0


class Retry:
    """Repeats writes on one log, until `close`; `epoch` is the term in which the node was opened.

    `explain` raises a better error than the one that a caller would get, if it knows one.
    """

    def __init__(
        self,
        append: Append,
        limits: RetryLimits | None = None,
        *,
        epoch: int,
        explain: Callable[[StreamingNodeError], None] = lambda _: None,
    ) -> None:
        self._append = append
        self._explain = explain
        self._own_next = ProducerStamp(NODE_PRODUCER_ID, epoch, 0)
        self._limits = limits or RetryLimits()
        self._closing = anyio.Event()
        self.repeated = 0
        """How many tries were not the first."""

    async def append(self, group: AppendGroup) -> AppendResult:
        """Append a group, once; raises what an append raises. Cancelling leaves a try that the log has to the log."""
        if group.producer is None:
            group.producer = self._own_next
        copy = _copier(group)
        try:
            return await self._append(group)
        except StreamingNodeError as error:
            if not self._limits.give_up_s or not _is_worth_repeating(error, in_doubt=False):
                self._explain(error)
                raise
            first = error
        return await self._repeat(group, copy, first)

    def close(self) -> None:
        """Repeat nothing any more: the log is closing. Tries under way end by themselves."""
        self._closing.set()

    async def _repeat(
        self, group: AppendGroup, copy: Callable[[], AppendGroup], error: StreamingNodeError
    ) -> AppendResult:
        """Repeat until the outcome is known or the time is up; cancelling a try leaves one that the log has to the log."""
        doubt = error if isinstance(error, Indeterminate) else None
        pause_s, joined = self._limits.first_s, group.twin
        with anyio.move_on_after(self._limits.give_up_s):
            while _is_worth_repeating(error, in_doubt=doubt is not None) and not await self._closes_within(pause_s):
                pause_s = min(2 * pause_s, self._limits.max_s)
                again = group.twin = copy()
                again.twin = joined  # it may be in the log, whoever stops waiting before the next try finds out
                self.repeated += 1
                try:
                    return await self._append(again)
                except Indeterminate as failed:
                    error = doubt = failed
                except StreamingNodeError as failed:
                    error = failed
        if doubt is not None and isinstance(error, UNANSWERED):
            raise doubt from error
        self._explain(error)
        raise error

    async def _closes_within(self, seconds: float) -> bool:
        with anyio.move_on_after(seconds):
            await self._closing.wait()
        return self._closing.is_set()


def _is_worth_repeating(error: StreamingNodeError, *, in_doubt: bool) -> bool:
    """Whether another try may say more, or do what this one could not."""
    if isinstance(error, Indeterminate):
        return True
    return in_doubt and error.retryable == "yes" and isinstance(error, UNANSWERED)


def _copier(group: AppendGroup) -> Callable[[], AppendGroup]:
    """Return what makes a group as this one is now, but for a sequence that it is given: that is the write's for good."""
    unstamped = [(message.header, message.txn_id) for message in group.messages]
    return partial(_copy, group, unstamped)


def _copy(group: AppendGroup, unstamped: list[tuple[Header, int]]) -> AppendGroup:
    messages = [
        MutableMessage(
            message.type,
            header,
            message.vchannel,
            message.payload,
            txn_id,
            message.properties,
            message.version,
        )
        for message, (header, txn_id) in zip(group.messages, unstamped, strict=True)
    ]
    return AppendGroup(messages, producer=group.producer, place=group.place)
