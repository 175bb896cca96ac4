"""What an open table is made of: whose it is, what it has taken, its files. No I/O; loads without the table's library."""

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
    """What a commit says about itself; `first_cut` is the first cut that changed the table, `cut` the state it is at."""

    node_id: str
    collection_id: int
    first_cut: int
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
