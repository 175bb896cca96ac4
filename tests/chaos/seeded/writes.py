"""Bugs of transactions, retries, and what recovery makes of the log."""

from typing import Any

from msgspec.structs import replace

import streamingnode.channel
from interceptors.recovery import RecoveredChannel
from interceptors.shard.state import ShardState
from interceptors.txn import TxnInterceptor
from interceptors.window import Window
from tests.chaos.seeded.bug import Right, SeededBug
from wal.adaptor import Wal
from wal.append import Pack
from wal.entry import LogEntry
from wal.headers import CommitTxnHeader, MessageType


def _abort_lost(_right: Right) -> Right:
    """A rollback commits: nobody looked at what was appended."""

    async def rollback(interceptor: TxnInterceptor, pack: Pack, append: Any) -> None:
        message = pack.messages[0]
        message.type = MessageType.COMMIT_TXN
        message.header = CommitTxnHeader()
        await interceptor._commit(pack, append)

    return rollback


def _recovery_ends_early(right: Right) -> Right:
    async def recover(log: Any, **options: Any) -> RecoveredChannel:
        class Short:
            def __getattr__(self, name: str) -> Any:
                return getattr(log, name)

            async def read(self, position: int, *, bytes_max: int) -> list[LogEntry]:
                entries: list[LogEntry] = await log.read(position, bytes_max=1)
                return (
                    []
                    if entries and entries[-1].last_position + 3 > log.durable_position
                    else entries
                )

        return await right(Short(), **options)  # type: ignore[no-any-return]

    return recover


def _offsets_of_the_last_row_but_one(right: Right) -> Right:
    def restore(data: bytes) -> ShardState:
        state: ShardState = right(data)
        state.next_offsets = {
            name: max(offset - 1, 0) for name, offset in state.next_offsets.items()
        }
        return state

    return restore


def _offsets_of_inserts(right: Right) -> Right:
    """Row offsets count calls instead of rows."""

    def add_rows(state: ShardState, vchannel: str, *arguments: Any) -> None:
        before = state.next_offsets.get(vchannel)
        right(state, vchannel, *arguments)
        if before is not None:
            state.next_offsets[vchannel] = before + 1

    return add_rows


def _retry_not_recognised(_right: Right) -> Right:
    return lambda _window, _stamp: None


def _window_not_rebuilt(_right: Right) -> Right:
    return lambda _window, _entry, _visible: None


def _window_not_persisted(right: Right) -> Right:
    return lambda window: right(Window(tick=window.tick))


def _result_of_another(right: Right) -> Right:
    def add(window: Window, stamp: Any, result: Any) -> None:
        right(window, stamp, replace(result, time_tick=result.time_tick + 1))

    return add


def _failed_write_comes_anew_unasked(right: Right) -> Right:
    async def is_in_log(wal: Wal, pack: Pack, doubt: Exception) -> bool:
        await right(wal, pack, doubt)
        return False

    return is_in_log


def _failed_write_is_taken_for_done(right: Right) -> Right:
    async def is_in_log(wal: Wal, pack: Pack, doubt: Exception) -> bool:
        return bool(await right(wal, pack, doubt)) or pack.ticket is not None

    return is_in_log


ABORT_LOST = SeededBug("abort lost", TxnInterceptor, "_rollback", _abort_lost)
RETRY_NOT_RECOGNISED = SeededBug("retry not recognised", Window, "find", _retry_not_recognised)
WINDOW_NOT_PERSISTED = SeededBug(
    "window not persisted", streamingnode.channel, "encode_window", _window_not_persisted
)
OTHERS = (
    SeededBug("recovery ends early", streamingnode.channel, "recover", _recovery_ends_early),
    SeededBug(
        "row offsets used again after recovery",
        ShardState,
        "restore",
        _offsets_of_the_last_row_but_one,
    ),
    SeededBug("row offsets count inserts", ShardState, "_add_rows", _offsets_of_inserts),
    SeededBug("window not rebuilt", Window, "observe", _window_not_rebuilt),
    SeededBug("another result for a retry", Window, "add", _result_of_another),
    SeededBug(
        "a failed write comes anew unasked", Wal, "_is_in_log", _failed_write_comes_anew_unasked
    ),
    SeededBug(
        "a failed write is taken for done", Wal, "_is_in_log", _failed_write_is_taken_for_done
    ),
)
