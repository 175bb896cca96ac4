"""What an open table is made of: whose it is, what it has taken, its files. No I/O; loads without the table's library."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class TableIdentity:
    """Whose rows a table holds."""

    node_id: str
    collection_id: int
    collection: str


@dataclass(frozen=True, slots=True)
class Watermark:
    """The newest cut a table has taken; cut 0 is before all."""

    cut: int
    tick: int
    crc32c: int


class CommitNote(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit says about itself: the cut it brought the table to, and the ticks of its first and last change.

    The version is the collection's state from `last_tick` until the `first_tick` of the next version. A commit that changed
    nothing has the cut's tick in both.
    """

    node_id: str
    collection_id: int
    first_tick: int
    last_tick: int
    cut: int
    tick: int
    crc32c: int
    attempt: str = ""


@dataclass(frozen=True, slots=True)
class TableVersion:
    """One version of a table and the cut it is the state of."""

    version: int
    note: CommitNote


@dataclass(frozen=True, slots=True)
class TableFile:
    """One active data file; a range is None where its writer recorded none."""

    path: str
    bytes: int
    rows: int | None
    partition: str
    key_range: tuple[int | str, int | str] | None = None
    offset_min: int | None = None
    vchannel_range: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class NewFile:
    """One data file to add; `stats` is the JSON text that Delta stores for readers that skip files."""

    path: str
    bytes: int
    rows: int
    partition: str
    stats: str


def state_at(history: Sequence[TableVersion], tick: int) -> TableVersion | None:
    """Return the version, of some that are newest first, that is the collection's state at a tick; None when none is.

    None is: past the newest cut, whose table has not seen what follows; between the first and the last change of one
    commit; and before the earliest version.
    """
    if not history or tick > history[0].note.tick:
        return None
    hidden_from = tick + 1
    for found in history:
        if found.note.last_tick <= tick:
            return found if tick < hidden_from else None
        hidden_from = found.note.first_tick
    return None


def nearest_states(histories: Sequence[Sequence[TableVersion]], tick: int) -> tuple[int | None, int | None]:
    """Return the last tick before `tick`, and the first one after it, at which every table has its state; None for none."""
    ends = {found.note.first_tick - 1 for history in histories for found in history}
    ends |= {history[0].note.tick for history in histories if history}
    starts = {found.note.last_tick for history in histories for found in history}

    def held(candidate: int) -> bool:
        return all(state_at(history, candidate) for history in histories)

    before = next(filter(held, sorted((end for end in ends if end < tick), reverse=True)), None)
    after = next(filter(held, sorted(start for start in starts if start > tick)), None)
    return before, after
