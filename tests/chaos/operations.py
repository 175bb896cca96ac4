"""What the workload asked of a node and was told, written down so that a kill of the process does
not take it away.

In: the invocation of each operation before it begins, its end when the caller knows it. Out: a file
of JSON lines outside the node directory, one `write` each: what was handed to the operating system
survives the death of the process (not of the machine, which is why a power cut here happens to the
node's file system alone). `read_operations` joins both lines; an operation that never ended is
indeterminate. Finer than `journal`, which knows only values: kinds, order within a transaction,
offsets, errors.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

Kind = Literal[
    "insert",
    "upsert",
    "delete",
    "transaction",
    "streamed",
    "rollback",
    "cut",
    "produced",
    "produced transaction",
]
"""`transaction` is buffered and written at once, `streamed` a session of several appends,
`rollback` one given up.

`produced` is a write of a named producer, asked for again after a kill: each try is an operation,
of the same rows.
"""

Outcome = Literal["ok", "failed", "indeterminate"]
"""Told that it happened, told that it did not, or not told."""

Action = Literal["insert", "upsert", "delete"]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One row: `number` is never used twice in the life of a directory, so that a second copy of a
    row is seen as one.
    """

    key: int
    number: int


class RowWrite(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that one operation writes into one collection; of a delete, only the keys."""

    collection: str
    action: Action
    rows: tuple[Row, ...] = ()
    keys: tuple[int, ...] = ()


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag="begun"):
    """An operation is about to be called. `process` names the caller: operations of one caller
    follow each other.
    """

    op: int
    process: str
    kind: Kind
    writes: tuple[RowWrite, ...]
    started_ns: int


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """An operation returned or raised; `error` is the code of what it raised, or its type when it
    has none.
    """

    op: int
    outcome: Outcome
    ended_ns: int
    tick: int = 0
    offsets: Mapping[str, tuple[int, int]] = {}
    positions: tuple[int, ...] = ()
    error: str = ""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One operation from call to answer; times are `time.monotonic_ns` of one machine, `ended_ns`
    None without an answer.

    `writes` are in the order they were made, all at one `tick`. `offsets` maps vchannels to first
    row offset and count.
    """

    op: int
    process: str
    kind: Kind
    writes: tuple[RowWrite, ...]
    started_ns: int
    ended_ns: int | None = None
    outcome: Outcome = "indeterminate"
    tick: int = 0
    offsets: Mapping[str, tuple[int, int]] = {}
    positions: tuple[int, ...] = ()
    error: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Begun | Ended).decode


class OperationWriter:
    """Appends records to a file; each has left the process when the call returns."""

    __slots__ = ("_descriptor",)

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )

    def write(self, record: Begun | Ended) -> None:
        """Add one record."""
        os.write(self._descriptor, _encode(record) + b"\n")

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)


def read_operations(path: Path) -> list[Operation]:
    """Return the operations of a file in the order they were called; empty when there is no
    file.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    # what follows the last newline was cut short by a kill
    return joined(_decode(line) for line in lines[:-1])


def joined(records: Iterable[Begun | Ended]) -> list[Operation]:
    """Return operations from their two records each."""
    operations: dict[int, Operation] = {}
    for record in records:
        fields = msgspec.structs.asdict(record)
        match record:
            case Begun():
                operations[record.op] = Operation(**fields)
            case Ended():
                operations[record.op] = msgspec.structs.replace(operations[record.op], **fields)
    return list(operations.values())
