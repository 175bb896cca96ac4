"""What a channel is after its log is read again: the checkpoint's state, brought up to the end of
the log.
"""

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
"""One read's worth of entries: what is decoded and applied before other tasks get their turn."""


@dataclass(frozen=True, slots=True)
class RecoveredChannel:
    """A channel as the end of its log leaves it, after so many entries read.

    `fences` maps vchannels to the tick of the last exclusive message read.
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
    """Return the channel that `log` describes, from a checkpoint at `position` (an LC) and `tick`.

    `outstanding` is that of the window of the term before, if this process had one.
    Raises `Corrupt` for damage, `UnsupportedFormat` for a newer snapshot, `Truncated` when the log
    starts after `position`.
    """
    state = ShardState() if shard_state is None else ShardState.restore(shard_state)
    window = Window(producer_limits, outstanding=outstanding)
    if producers is not None:
        kind = message_id_kind(log.wal_name)
        # In a thread: a full window takes longer than the event loop may be held.
        window = await in_thread(
            lambda: decode_window(producers, kind, producer_limits, outstanding=outstanding)
        )

    def begin_missing(commit: Message) -> None:
        # `position` is an LC: of every transaction that commits after the checkpoint the begin is
        # in what is read.
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
        if commits is None:  # of what began before the first entry, the commit may lie before it
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
                state.observe(message)  # does nothing for what the snapshot has
                if isinstance(message, Message) and message.type in DDL:
                    fences[message.vchannel] = message.time_tick
        next_position = entries[-1].last_position + 1
        read = read + len(entries)
        failpoint("recovery.entries_read")
        await asyncio.sleep(0)
    return RecoveredChannel(
        state, buffer.open_transactions, fences, commits or Commits(), window, read
    )
