"""The journal of a run: what clients asked, were told and read, one JSON line each, in the order of
time.

In: calls of the clients under test, in any process. Out: a file that survives the client's death
line by line, and the `Event`s in it for `judge.verdict`. A call begins with `Asked`, before
anything can have happened, and ends with `Told`; one without an end is open: it may have happened
or not. Every value is written once in a whole history, so that a value read names the call that
wrote it.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

Outcome = Literal["ok", "failed", "open"]
"""`failed` means certainly not in the log, `open` that nobody knows."""


class Put(msgspec.Struct, frozen=True, array_like=True):
    """A row written: `value` is unique in the history. `replace` removes earlier rows of the key,
    of all partitions, first.

    A collection is named so that one that is made again after a drop has another name.
    """

    collection: str
    key: int
    value: int
    replace: bool = False
    partition: str = ""


class Drop(msgspec.Struct, frozen=True, array_like=True):
    """All rows of a key removed."""

    collection: str
    key: int


class Clear(msgspec.Struct, frozen=True, array_like=True):
    """A partition dropped with all its rows; without a partition, the collection itself."""

    collection: str
    partition: str = ""


class Asked(msgspec.Struct, frozen=True, tag="asked"):
    """A call begins. `puts` and `drops` take place together at one tick, drops first; all are empty
    for a read.
    """

    op: int
    client: str
    at_ns: int
    puts: tuple[Put, ...] = ()
    drops: tuple[Drop, ...] = ()
    clears: tuple[Clear, ...] = ()


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Row offsets that the inserts at a tick took on one vchannel."""

    tick: int
    vchannel: str
    first: int
    count: int


class Told(msgspec.Struct, frozen=True, tag="told"):
    """A call ends. `tick` is the write's, 0 when it is not known; `error` the code of what it
    raised.

    `position` is that of the write's last message, 0 when it is not known; `spans` are the row
    offsets that it was told, if any was.
    """

    op: int
    at_ns: int
    outcome: Outcome
    tick: int = 0
    error: str = ""
    position: int = 0
    spans: tuple[Span, ...] = ()


NO_VALUE = 0
"""Stands for a message without rows; no row has this value."""


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """One row as a reader met it, in its order; `position` is the message's."""

    tick: int
    position: int
    value: int


class Removed(msgspec.Struct, frozen=True, array_like=True):
    """Keys that a reader was told are removed."""

    tick: int
    position: int
    keys: tuple[int, ...]


class Scanned(msgspec.Struct, frozen=True, tag="scanned"):
    """A reader's part of a collection: everything above `after_tick` up to `until_tick`, in the
    order of delivery.

    `asked_ns` is when `until_tick` was asked for: what was acknowledged before is at or below it.
    Parts of one reader have its name in `reader` and follow each other. `removed` is None when it
    was not noted. `wrong` are values whose other columns are not what was written.
    """

    collection: str
    reader: str
    asked_ns: int
    told_ns: int
    after_tick: int
    until_tick: int
    rows: tuple[Seen, ...]
    spans: tuple[Span, ...] = ()
    removed: tuple[Removed, ...] | None = None
    wrong: tuple[int, ...] = ()


class State(msgspec.Struct, frozen=True, tag="state"):
    """The values of a collection as of `tick`, which was asked for at `asked_ns`: what was
    acknowledged before is in it.
    """

    collection: str
    asked_ns: int
    told_ns: int
    tick: int
    values: tuple[int, ...]
    wrong: tuple[int, ...] = ()


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The node's process ended: what is open by now happened, or never will.

    `suffix_lost`: acknowledged calls may be gone, if all later ones are too (durability `os`, and
    power lost).
    """

    at_ns: int
    suffix_lost: bool = False


class Made(msgspec.Struct, frozen=True, tag="made"):
    """A collection exists from now on."""

    at_ns: int
    collection: str


class Listed(msgspec.Struct, frozen=True, tag="listed"):
    """The collections that there are."""

    asked_ns: int
    collections: tuple[str, ...]


class Below(msgspec.Struct, frozen=True, tag="below"):
    """What lies below a node that was read before and is closed: the log, and the values in the
    files of its cuts.
    """

    entries: tuple[tuple[int, int, int], ...]
    """First position, last position and tick of each write in the entries kept."""
    files: dict[str, tuple[int, ...]]
    cut_tick: int = 0
    findings: tuple[str, ...] = ()
    """What is wrong with the files as such."""


Event = Asked | Told | Scanned | State | Died | Made | Listed | Below

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Event)


class Journal:
    """Appends events to a file, each with one `write` call; a context manager. A killed process
    loses nothing it noted.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )

    def note(self, event: Event) -> None:
        """Write an event; it is with the operating system when this returns."""
        os.write(self._descriptor, _encoder.encode(event) + b"\n")

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_journal(path: Path) -> Iterator[Event]:
    """Yield the events of a file; a last line cut short by a kill is left out."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield _decoder.decode(line)


def decode_events(lines: Iterable[bytes]) -> list[Event]:
    """Return the events of encoded lines."""
    return [_decoder.decode(line) for line in lines]
