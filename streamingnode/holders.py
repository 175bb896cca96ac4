"""The holders of a node's log: named readers and open transactions, for an operator to list and
end.
"""

import msgspec

from scanner.deliver_policy import DeliverPolicy, PlainPlace, ReaderNotFound
from scanner.named_reader import KnownReader, NamedReaders
from streamingnode.channel import Channel
from wal.errors import InvalidArgument, Truncated, shown
from wal.position import message_id_kind
from wal.timetick import physical_ms

ABORTED = "aborted by an operator"
"""The reason in the log of a rollback by an operator."""


class ReaderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A named reader: it has everything up to `tick`, and holds the log from `message_id` on.

    `backlog` counts the messages of all collections from that place to the end of the log.
    `behind_s` is the age of the place, or of the reader's oldest collection if that is less. It
    also grows for a reader that has read everything while it is closed.
    """

    collections: tuple[str, ...]
    name: str
    is_open: bool
    message_id: str
    tick: int
    backlog: int
    behind_s: float


class TransactionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An open transaction that sent rows before its commit; the node rolls it back when it is idle
    for `keepalive_s`.
    """

    txn_id: int
    state: str
    collections: tuple[str, ...]
    bodies: int
    bytes: int
    age_s: float
    idle_s: float
    keepalive_s: float


async def list_readers(channel: Channel, readers: NamedReaders) -> tuple[ReaderInfo, ...]:
    """Return the named readers of live collections, by collection and name."""
    live = channel.live().keys()
    found = [
        _reader_info(channel, each)
        for each in readers.known()
        if not live.isdisjoint(each.collections)
    ]
    return tuple(sorted(found, key=lambda info: (info.collections, info.name)))


async def seek_reader(
    channel: Channel,
    readers: NamedReaders,
    collection: str,
    name: str,
    start: str,
    at: PlainPlace,
    *,
    dry_run: bool,
) -> ReaderInfo:
    """Move a named reader to the start of a policy, which is plain data; as `Node.seek_reader`."""
    if not isinstance(dry_run, bool):
        raise InvalidArgument(f"dry_run={shown(dry_run)} is no truth value — give true or false")
    info = channel.catalog.collection_by_name(collection)
    policy = DeliverPolicy.of_plain(start, at)
    known = [each for each in readers.known() if info.id in each.collections and each.name == name]
    if not known:
        raise ReaderNotFound(f"collection {info.name!r} has no reader {shown(name)}")
    to = await channel.find_position(policy)
    if not dry_run:
        await readers.move(info.id, name, to)
        try:  # the log may have been truncated beyond that place before the reader held it
            async with channel.read(to.start):
                pass
        except Truncated:
            await readers.move(info.id, name, known[0].position)
            raise
    return _reader_info(channel, known[0]._replace(position=to))


async def list_transactions(channel: Channel) -> tuple[TransactionInfo, ...]:
    """Return the open transactions, oldest first."""
    transactions = channel.term.transactions
    now_ms = transactions.now_ms()
    names = {
        vchannel: info.name for info in channel.catalog.collections() for vchannel in info.vchannels
    }
    return tuple(
        TransactionInfo(
            txn_id=each.txn_id,
            state=each.state.name.lower(),
            collections=tuple(
                sorted({names[vchannel] for vchannel in each.vchannels & names.keys()})
            ),
            bodies=len(each.bodies),
            bytes=each.size_bytes,
            age_s=(now_ms - each.begun_ms) / 1000,
            idle_s=(now_ms - each.active_ms) / 1000,
            keepalive_s=each.keepalive_ms / 1000,
        )
        for each in transactions.sessions
    )


def _reader_info(channel: Channel, reader: KnownReader) -> ReaderInfo:
    at = reader.position
    infos = [info for info in channel.catalog.collections() if info.id in reader.collections]
    # empty if all of them were dropped meanwhile
    since = max(at.tick, min((info.created_tick for info in infos), default=0))
    return ReaderInfo(
        collections=tuple(sorted(info.name for info in infos)),
        name=reader.name,
        is_open=reader.is_open,
        message_id=str(message_id_kind(at.wal_name)(at.position)),
        tick=at.tick,
        backlog=max(0, channel.log.next_position - at.position),
        behind_s=max(0, channel.ticks.now_ms() - physical_ms(since)) / 1000,
    )
