"""Recovers a channel: takes the checkpoint's state and applies the rest of the log to it."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from interceptors.shard.state import ShardState
from interceptors.txn import Commits
from interceptors.window import ProducerLimits, Window, decode_window
from wal.entry import OpenTransaction, TransactionBuffer
from wal.errors import Corrupt
from wal.failpoint import failpoint
from wal.headers import DDL, MessageType
from wal.log import Log
from wal.message import Message
from wal.position import FIRST_POSITION, message_id_kind
from wal.runtime import in_thread

READ_BYTES = 1 << 20
"""Bytes of entries in one read, which are applied in one step before other tasks get their turn."""


@dataclass(frozen=True, slots=True)
class RecoveredChannel:
    """The state of a channel at the end of its log.

    `fences` maps vchannels to the tick of the last exclusive message read; `entries` is the number
    of entries read.
    """

    shard_state: ShardState
    open_transactions: tuple[OpenTransaction, ...]
    fences: Mapping[str, int]
    commits: Commits
    window: Window
    entries: int


async def recover(
    log: Log,
    *,
    position: int = FIRST_POSITION,
    tick: int = 0,
    shard_state: bytes | None = None,
    producers: bytes | None = None,
    producer_limits: ProducerLimits | None = None,
    outstanding: Mapping[int, int] | None = None,
) -> RecoveredChannel:
    """Return the channel that `log` describes, from a checkpoint at `position` (a last-confirmed
    position) and `tick`.

    `outstanding` is that of the previous term's window, if this process had one.
    Raises `Corrupt` for damage, `UnsupportedFormat` for a newer snapshot, `Truncated` when the log
    starts after `position`.
    """
    state = ShardState() if shard_state is None else ShardState.restore(shard_state)
    window = Window(producer_limits, outstanding=outstanding)
    if producers is not None:
        kind = message_id_kind(log.wal_name)
        # Decode in a thread: a full window takes longer than the event loop may be blocked.
        window = await in_thread(
            lambda: decode_window(producers, kind, producer_limits, outstanding=outstanding)
        )

    def begin_missing(commit: Message) -> None:
        # `position` is a last-confirmed position: if a transaction commits after the checkpoint,
        # its begin is at or after `position`.
        if commit.time_tick > tick:
            raise Corrupt(
                f"transaction {commit.txn_id} commits at position {commit.position}, after the "
                f"checkpoint's tick {tick}, "
                f"but begins before the checkpoint's position {position}"
            )

    buffer = TransactionBuffer(begin_missing=begin_missing)
    fences: dict[str, int] = {}
    commits: Commits | None = None
    next_position = position
    read = 0
    while entries := await log.read(next_position, bytes_max=READ_BYTES):
        if commits is None:  # a transaction of an earlier begin may have committed before this read
            commits = Commits(
                known_after=entries[0].first_tick - 1
                if entries[0].first_position > FIRST_POSITION
                else 0
            )
        for entry in entries:
            if entry.messages and (head := entry.messages[0]).type is MessageType.COMMIT_TXN:
                commits.add(head.txn_id)
            visible = buffer.observe(entry)
            window.observe(entry, visible)
            for message in visible:
                state.observe(message)  # does nothing for messages that the snapshot includes
                if isinstance(message, Message) and message.type in DDL:
                    fences[message.vchannel] = message.time_tick
        next_position = entries[-1].last_position + 1
        read = read + len(entries)
        failpoint("recovery.entries_read")
        await asyncio.sleep(0)
    return RecoveredChannel(
        state, buffer.open_transactions, fences, commits or Commits(), window, read
    )
