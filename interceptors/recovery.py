"""What a channel is after its log is read again: the checkpoint's state, brought up to the end of the log.

In comes a log and a checkpoint's content, out go the parts from which the live append path is built. The checkpoint is an
LC, so the begin of every transaction that is still open at the checkpoint, or commits after it, is in what is read; a commit
that says otherwise means that the log or the checkpoint is not what was written.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from anyio import to_thread

from interceptors.shard.state import ShardState
from interceptors.txn_manager import Commits
from interceptors.window import ProducerLimits, Window, Write, decode_window
from wal.errors import Corrupt
from wal.failpoint import failpoint
from wal.headers import EXCLUSIVE, MessageType
from wal.log import Log
from wal.message import LogEntry, Message, OpenTransaction, TransactionBuffer
from wal.position import FIRST_POSITION, message_id_kind

READ_BYTES = 1 << 20
"""One read's worth of entries: what is decoded and applied before other tasks get their turn."""


@dataclass(frozen=True, slots=True)
class RecoveredChannel:
    """A channel as the end of its log leaves it.

    `open_transactions` are in the order of their begins. `fences` maps vchannels to the tick of the last exclusive message
    read. `commits` has the transactions that committed lately, `window` the writes whose retries are recognised.
    `last_confirmed` is where a reader of the next message has to start.
    """

    shard_state: ShardState
    open_transactions: tuple[OpenTransaction, ...]
    fences: Mapping[str, int]
    commits: Commits
    window: Window
    last_confirmed: int


async def recover(
    log: Log,
    *,
    position: int = FIRST_POSITION,
    tick: int = 0,
    shard_state: bytes | None = None,
    producers: bytes | None = None,
    producer_limits: ProducerLimits | None = None,
    held: Collection[Write] = frozenset(),
) -> RecoveredChannel:
    """Return the channel that `log` says, from a checkpoint at `position` (an LC) and `tick`.

    Of the writes that are `held` nothing is forgotten on the way.

    Raises `Corrupt` for damage, `UnsupportedFormat` for a newer snapshot, `Truncated` when the log starts after `position`.
    """
    window = await _recovered_window(log, producers, producer_limits, held)
    state = ShardState() if shard_state is None else ShardState.restore(shard_state)

    def begin_missing(commit: Message) -> None:
        if commit.time_tick > tick:
            raise Corrupt(
                f"transaction {commit.txn_id} commits at position {commit.position}, after the checkpoint's tick {tick}, "
                f"but begins before the checkpoint's position {position}"
            )

    buffer = TransactionBuffer(begin_missing=begin_missing)
    fences: dict[str, int] = {}
    commits: Commits | None = None
    next_position = position
    while entries := await log.read(next_position, bytes_max=READ_BYTES):
        commits = commits or _commits_from(entries[0])
        for entry in entries:
            if entry.messages[0].type is MessageType.COMMIT_TXN:
                commits.add(entry.messages[0].txn_id)
            visible = buffer.observe(entry)
            window.observe(entry, visible)
            for message in visible:
                state.observe(message)  # does nothing for what the snapshot has
                if isinstance(message, Message) and message.type in EXCLUSIVE:
                    fences[message.vchannel] = message.time_tick
        next_position = entries[-1].last_position + 1
        failpoint("recovery.entries_read")
        await asyncio.sleep(0)
    transactions = buffer.open_transactions
    return RecoveredChannel(
        shard_state=state,
        open_transactions=transactions,
        fences=fences,
        commits=commits or Commits(),
        window=window,
        last_confirmed=transactions[0].begin.position if transactions else next_position,
    )


def _commits_from(first: LogEntry) -> Commits:
    """Return an empty list of the commits in `first` and behind it: of what began before, the commit may lie before."""
    return Commits(known_after=first.time_tick - 1 if first.first_position > FIRST_POSITION else 0)


async def _recovered_window(
    log: Log, saved: bytes | None, limits: ProducerLimits | None, held: Collection[Write]
) -> Window:
    if saved is None:
        return Window(limits, held=held)
    kind = message_id_kind(log.wal_name)
    # In a thread: a full window takes longer than the event loop may be held.
    return await to_thread.run_sync(lambda: Window.thaw(decode_window(saved, kind), limits, held=held))
