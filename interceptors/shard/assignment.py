"""Which segment and which row offsets rows get, in their order inside one group or transaction. Pure.

Inserts advance their vchannel's next offset; a delete gets the next offset of that moment, so it removes what came before
it and nothing after. Rows of one partition of one vchannel go to one segment together: they are one allocation.
"""

from collections.abc import Iterable

import msgspec

from interceptors.change import Change
from interceptors.shard.segment import SegmentKey
from interceptors.shard.state import ShardState
from wal.headers import BodyAssignment, DeleteHeader, InsertHeader


class Assignment(msgspec.Struct, frozen=True):
    """What rows get: one assignment for each change, offsets by vchannel as (first, count), segments yet to be made."""

    bodies: list[BodyAssignment] = []
    row_offsets: dict[str, tuple[int, int]] = {}
    missing: dict[SegmentKey, None] = {}


def assign(state: ShardState, changes: Iterable[Change], *, tick: int) -> Assignment:
    """Return what inserts and deletes get at `tick`; the state is not changed."""
    assignment = Assignment()
    next_offsets: dict[str, int] = {}
    for change in changes:
        vchannel, header = change.vchannel, change.header
        offset = next_offsets.get(vchannel)
        if offset is None:
            offset = next_offsets[vchannel] = state.next_offsets[vchannel]
        if isinstance(header, InsertHeader):
            next_offsets[vchannel] = offset + header.rows
            _assign_rows(state, assignment, vchannel, header, offset=offset, tick=tick)
        else:
            assignment.bodies.append(BodyAssignment(0, offset))
    return assignment


def stamp(change: Change, assigned: BodyAssignment) -> Change:
    """Return the change with what it was assigned in its header."""
    kind, vchannel, header, payload_bytes = change
    if isinstance(header, InsertHeader):
        return Change(kind, vchannel, _stamp_insert(header, assigned), payload_bytes)
    assert isinstance(header, DeleteHeader), "only inserts and deletes are assigned anything"
    return Change(kind, vchannel, msgspec.structs.replace(header, next_offset=assigned.offset), payload_bytes)


def _stamp_insert(header: InsertHeader, assigned: BodyAssignment) -> InsertHeader:
    return InsertHeader(
        header.collection_id,
        header.partition_id,
        header.schema_version,
        header.rows,
        assigned.segment_id,
        assigned.offset,
        header.part,
    )


def _assign_rows(
    state: ShardState, assignment: Assignment, vchannel: str, header: InsertHeader, *, offset: int, tick: int
) -> None:
    segment = state.open_segment(vchannel, header.partition_id)
    if segment is None:
        assignment.missing[SegmentKey(vchannel, header.collection_id, header.partition_id)] = None
        return
    assert segment.created_tick < tick, "a segment is older than the rows in it"
    first, count = assignment.row_offsets.get(vchannel, (offset, 0))
    assignment.row_offsets[vchannel] = (first, count + header.rows)
    assignment.bodies.append(BodyAssignment(segment.segment_id, offset))
