"""Bugs of transactions, retries, and what recovery makes of the log."""

import itertools
from dataclasses import replace
from typing import Any

import msgspec

import streamingnode.channel
from interceptors.recovery import RecoveredChannel
from interceptors.shard.state import ShardState
from interceptors.txn import TxnInterceptor
from interceptors.window import Window
from tests.chaos.seeded.bug import Right, SeededBug
from wal.adaptor import Wal
from wal.append import AppendGroup
from wal.entry import LogEntry
from wal.headers import CommitTxnHeader, MessageType
from wal.position import RocksMessageId


def _abort_lost(_right: Right) -> Right:
    """A rollback commits: nobody looked at what was appended."""

    async def rollback(interceptor: TxnInterceptor, group: AppendGroup, append: Any) -> Any:
        message = group.messages[0]
        message.type, message.header = MessageType.COMMIT_TXN, CommitTxnHeader()
        return await interceptor._commit(group, append)

    return rollback


def _recovery_ends_early(right: Right) -> Right:
    async def recover(log: Any, **options: Any) -> RecoveredChannel:
        class Short:
            def __getattr__(self, name: str) -> Any:
                return getattr(log, name)

            async def read(self, position: int, *, bytes_max: int) -> list[LogEntry]:
                entries: list[LogEntry] = await log.read(position, bytes_max=1)
                return [] if entries and entries[-1].last_position + 3 > log.durable_position else entries

        return await right(Short(), **options)  # type: ignore[no-any-return]

    return recover


def _offsets_of_the_last_row_but_one(right: Right) -> Right:
    def restore(data: bytes) -> ShardState:
        state: ShardState = right(data)
        state.next_offsets = {name: max(offset - 1, 0) for name, offset in state.next_offsets.items()}
        return state

    return restore


def _offsets_of_inserts(right: Right) -> Right:
    """Row offsets count calls instead of rows."""

    def insert(state: ShardState, header: Any, change: Any, tick: int) -> Any:
        before = state.next_offsets.get(change.vchannel)
        fits = right(state, header, change, tick)
        if before is not None:
            state.next_offsets[change.vchannel] = before + 1
        return fits

    return insert


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


def _second_id_for_a_retry(right: Right) -> Right:
    numbers = itertools.count(1 << 40)

    def copier(first: AppendGroup) -> Any:
        copy = right(first)

        def other() -> AppendGroup:
            group: AppendGroup = copy()
            assert group.producer is not None, "what is repeated is stamped"
            group.producer = msgspec.structs.replace(group.producer, sequence=next(numbers))
            return group

        return other

    return copier


def _indeterminate_is_done(_right: Right) -> Right:
    async def repeat(_wal: Any, group: AppendGroup, _copy: Any, error: BaseException) -> Any:
        if group.ticket is None:
            raise error
        return group.result(RocksMessageId)

    return repeat


ABORT_LOST = SeededBug("abort lost", TxnInterceptor, "_rollback", _abort_lost)
RETRY_NOT_RECOGNISED = SeededBug("retry not recognised", Window, "find", _retry_not_recognised)
WINDOW_NOT_PERSISTED = SeededBug("window not persisted", streamingnode.channel, "encode_window", _window_not_persisted)
OTHERS = (
    SeededBug("recovery ends early", streamingnode.channel, "recover", _recovery_ends_early),
    SeededBug("row offsets used again after recovery", ShardState, "restore", _offsets_of_the_last_row_but_one),
    SeededBug("row offsets count inserts", ShardState, "_insert", _offsets_of_inserts),
    SeededBug("window not rebuilt", Window, "observe", _window_not_rebuilt),
    SeededBug("another result for a retry", Window, "add", _result_of_another),
    SeededBug("a retry is given a second id", AppendGroup, "copier", _second_id_for_a_retry),
    SeededBug("an indeterminate write is taken for done", Wal, "_repeat", _indeterminate_is_done),
)
