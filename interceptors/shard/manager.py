"""The live channel: decides and stamps groups in the step of their tick, and keeps the state in step with the log.

In come groups from the interceptor; out go the same groups stamped, or a typed error, or the segments that are missing.
A group changes the state when it has its place in the log's queue, not before: until then it may still be refused. The
place is only known once the log end has run, which is why a decision stays `pending` until the next look at the state;
between the two nothing else can run.
"""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from interceptors.change import Change
from interceptors.shard.catalog import Catalog
from interceptors.shard.decision import BodiesOf, decide
from interceptors.shard.seal_policy import SegmentLimits
from interceptors.shard.segment import SegmentKey
from interceptors.shard.state import ShardState
from wal.append import AppendGroup
from wal.headers import CreateSegmentHeader
from wal.message import MutableMessage
from wal.message_type import MessageType


class _Pending(NamedTuple):
    group: AppendGroup
    changes: Sequence[Change]


def no_bodies(txn_id: int) -> list[Change]:
    """Stand in where there are no streamed transactions."""
    raise AssertionError(f"transaction {txn_id} has no session")


class ShardManager:
    """Wraps the state of one channel for the append path. Lives on the event loop; nothing here waits.

    `bodies_of` names the bodies of an open transaction; `draw` returns random numbers from 0 up to 1.
    """

    def __init__(
        self,
        state: ShardState,
        *,
        bodies_of: BodiesOf = no_bodies,
        limits: SegmentLimits | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.limits = limits or SegmentLimits()
        self._state = state
        self._bodies_of = bodies_of
        self._draw = draw
        self._next_id = 0
        self._pending: _Pending | None = None

    @property
    def state(self) -> ShardState:
        """The channel as of the last group in the log's queue."""
        self.settle()
        return self._state

    @property
    def catalog(self) -> Catalog:
        """What exists as of the last group in the log's queue."""
        return self.state.catalog

    @property
    def something_to_cut(self) -> bool:
        """Whether rows, deletes or drops came since the last cut."""
        return self.state.something_to_cut

    def allocate_id(self) -> int:
        """Return an id for a new collection, partition or segment, higher than every one in the log.

        An id that no message carries in the end is used again after a restart, which nobody can tell.
        """
        number = self.next_id
        self._next_id = number + 1
        return number

    @property
    def next_id(self) -> int:
        """The id that `allocate_id` gives out next."""
        return max(self._next_id, self.state.next_id)

    def skip_ids_below(self, next_id: int) -> None:
        """Give out no id below `next_id`: an earlier term of this log gave them to messages that may still come."""
        self._next_id = max(self._next_id, next_id)

    def admit(self, group: AppendGroup) -> tuple[SegmentKey, ...]:
        """Stamp a group and return (), or change nothing and return the segments it needs first.

        Raises the typed error of what does not fit, and changes nothing then.
        """
        decision = decide(self.state, group, self._bodies_of)
        if decision.missing:
            return tuple(decision.missing)
        for message, header in zip(group.messages, decision.headers, strict=True):
            message.header = header
        group.row_offsets = decision.row_offsets
        if decision.changes is not None:
            self._pending = _Pending(group, decision.changes)
        return ()

    def ended(self, group: AppendGroup) -> None:
        """Apply a group if the log has it, forget it if the log refused it."""
        self.settle()
        if self._pending is not None and self._pending.group is group:
            self._pending = None

    def settle(self) -> None:
        """Apply the last admitted group once the log has it."""
        pending = self._pending
        if pending is None or (ticket := pending.group.ticket) is None:
            return
        self._pending = None
        position = ticket.first_position + len(pending.group.messages) - 1
        self._state.apply(pending.changes, tick=pending.group.time_tick, position=position)

    def needs_segment(self, key: SegmentKey) -> bool:
        """Whether rows for `key` are welcome and there is no segment to take them."""
        state = self.state
        is_writable = state.catalog.is_writable(key.vchannel, key.partition_id)
        return is_writable and state.open_segment(key.vchannel, key.partition_id) is None

    def new_segment(self, key: SegmentKey) -> MutableMessage:
        """Return a CREATE_SEGMENT message for `key`, with an id of its own each time."""
        header = CreateSegmentHeader(
            collection_id=key.collection_id,
            partition_id=key.partition_id,
            segment_id=self.allocate_id(),
            schema_version=self.catalog.collection(key.collection_id).schema_version,
            bytes_max=self.limits.bytes_max_of_next(self._draw()),
            rows_max=self.limits.rows_max,
        )
        return MutableMessage(MessageType.CREATE_SEGMENT, header, key.vchannel)

    def forget_below(self, tick: int) -> None:
        """Forget what was dropped before `tick` and a cut has named; call once no reader starts below `tick`."""
        self.state.forget_below(tick)
