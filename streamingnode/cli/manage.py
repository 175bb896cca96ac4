"""What is kept in a node, on the command line: collections and partitions, readers, transactions,
topics and channels.
"""

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import streamingnode as sn
from streamingnode.cli.command import DRY_RUN, Place, actions, command, operand, option, with_node
from streamingnode.cli.data import describe_collection, start_policy
from streamingnode.cli.output import Output, fields_of, format_bytes, format_count
from streamingnode.progress import Progress
from wal.errors import GroupNotFound, InvalidArgument, TopicNotFound, shown

if TYPE_CHECKING:
    import pyarrow as pa

    from streamingnode.schema import AnyField
    from wal.rocksmq.contract import TopicInfo


@command(
    'streamingnode collection create data orders --schema "id:int64 not null,item:string" '
    "--primary-key id",
    'streamingnode collection create data prices --schema "at:timestamp[us, tz=UTC],p:decimal(9, '
    '2)" --primary-key at',
    "streamingnode collection drop data orders --dry-run",
    "streamingnode collection drop --node tcp://127.0.0.1:7070 orders --json",
)
async def collection(
    output: Output,
    *,
    action: str = actions(create="--schema --primary-key", drop="[--dry-run]"),
    node: "sn.Node",
    collection: str = operand("the collection"),
    schema: str | None = option(
        "for create: NAME:TYPE, separated by commas, with `not null` where that is meant; types as "
        "`ls` shows them",
        metavar="COLUMNS",
    ),
    primary_key: str | None = option("for create: the primary key", metavar="COLUMN"),
    shards: int = option("for create: number of shards (default: 1)", default=1, metavar="N"),
    partition: list[str] = option("for create: a partition; may be repeated", metavar="NAME"),
    dry_run: bool = DRY_RUN,
) -> None:
    """Create a collection, or drop one with all its rows.

    `ls` shows which there are; `insert --create` makes one with the columns of a file, lists and
    structs too. Dropping is at once and for good, and ends open transactions on the collection.
    """
    if action == "create":
        columns = parse_schema(str(schema))
        key = str(primary_key)
        found = await node.create_collection(
            collection, columns, primary_key=key, shards=shards, partitions=partition
        )
    else:
        found = node.collection(collection)
        if not dry_run:
            await node.drop_collection(collection)
    done = "created" if action == "create" else "dropped"
    _print_change(output, done, f"collection {collection}", describe_collection(found), dry_run)


COUNTS = "produced", "delivered", "acked"
_BETWEEN_COLUMNS = re.compile(r",(?![^\[(]*[\])])")
_ZONED = re.compile(r"timestamp\[(ms|us), *(?:tz=)?([^\]]+)\]")
_DECIMAL = re.compile(r"decimal(?:128)?\((\d+), *(\d+)\)")


def parse_schema(text: str) -> "pa.Schema":
    """Return the columns of `--schema`. Raises `InvalidArgument`; whether a node keeps them is its
    own question.
    """
    import pyarrow as pa

    by_alias: Any = pa.type_for_alias  # its stub knows the aliases one by one
    fields: list[AnyField] = []
    for column in _BETWEEN_COLUMNS.split(text):
        name, _, kind = map(str.strip, column.partition(":"))
        bare = kind.removesuffix("not null").rstrip()
        try:
            if zoned := _ZONED.fullmatch(bare):
                of: pa.DataType = pa.timestamp("ms" if zoned[1] == "ms" else "us", zoned[2])
            elif decimal := _DECIMAL.fullmatch(bare):
                of = pa.decimal128(int(decimal[1]), int(decimal[2]))
            else:
                of = by_alias(bare)
        except ValueError:
            raise InvalidArgument(
                f"--schema: {shown(column)} is no column — give NAME:TYPE with a type as `ls` "
                "shows them, as id:int64 or "
                "at:timestamp[us, UTC]; insert --create takes lists and structs from a file"
            ) from None
        fields.append(pa.field(name, of, nullable=bare == kind))
    return pa.schema(fields)


@command(
    "streamingnode partitions list data orders",
    "streamingnode partitions create data orders eu",
    "streamingnode partitions drop data orders eu --json",
)
async def partitions(
    output: Output,
    *,
    action: str = actions(list="", create="partition", drop="partition"),
    node: "sn.Node",
    collection: str = operand("the collection"),
    partition: str | None = operand("the partition to create or drop, with all its rows"),
) -> None:
    """List, create or drop the partitions of a collection.

    Prints the partitions there are afterwards. Dropping one drops its rows, at once and for good,
    and ends open transactions on the collection; `_default` cannot be dropped.
    """
    if partition is not None:
        await (node.create_partition if action == "create" else node.drop_partition)(
            collection, partition
        )
    names = node.collection(collection).partitions
    for name in names:
        output.line(name)
    output.document({"collection": collection, "partitions": names})


@command(
    "streamingnode reader ls data",
    "streamingnode reader seek data orders billing --to @1h --dry-run",
    "streamingnode reader seek data orders billing --to earliest",
    "streamingnode reader rm --node tcp://127.0.0.1:7070 orders billing --json",
)
async def reader(
    output: Output,
    *,
    action: str = actions(ls="[collection]", seek="collection reader --to", rm="collection reader"),
    node: "sn.Node",
    collection: str | None = operand("the reader's collection; for ls all by default"),
    reader: str | None = operand("the reader, for all but ls"),
    to: str | None = option(
        "for seek: where it goes on, as in `tail --from`, without -N", metavar="POSITION"
    ),
    dry_run: bool = DRY_RUN,
) -> None:
    """List, move or remove the named readers of a node.

    A named reader holds the log from its place on, also when nobody opens it any more: `behind_s`
    is how old that is, and `backlog` how many messages, of all collections, are behind it. `seek`
    makes it go on from another place: what lies between comes again, or never. `rm` forgets its
    place. A reader that is open can be neither moved nor removed (READER_BUSY): end its program
    first.
    """
    policy = start_policy(str(to), "--to") if action == "seek" else None
    if collection is not None:
        node.collection(collection)
    found = [
        each
        for each in await node.readers()
        if collection is None or collection in each.collections
    ]
    if reader is None:
        output.listing("readers", found)
        return
    before = next((each for each in found if each.name == reader), None)
    if before is None:
        text = f"collection {collection!r} has no reader {shown(reader)}"
        raise sn.errors.ReaderNotFound(f"{text} — `streamingnode reader ls` names them")
    what = f"reader {reader} of {collection}"
    if policy is not None:
        after = await node.seek_reader(before.collections[0], reader, policy, dry_run=dry_run)
        moved = (
            f"{'would go' if dry_run else 'went'} from {before.message_id} to {after.message_id}"
        )
        output.result(
            f"{what} {moved}: backlog {before.backlog} to {after.backlog}",
            {"moved": not dry_run, "before": before, "after": after},
        )
        return
    if not dry_run:
        await node.delete_reader(before.collections[0], reader)
    _print_change(output, "removed", what, before, dry_run)


@command(
    "streamingnode txn ls data",
    "streamingnode txn ls --node tcp://127.0.0.1:7070 --json",
    "streamingnode txn abort data 470693110239723521",
)
async def txn(
    output: Output,
    *,
    action: str = actions(ls="", abort="id"),
    node: "sn.Node",
    id: int | None = operand("the transaction, for abort"),  # noqa: A002 - as shown
    dry_run: bool = DRY_RUN,
) -> None:
    """List the open transactions of a node, or end one.

    Those that are sent before their commit: small ones are never open in the node. One holds the
    log from its begin on. It ends by itself when it is idle for its keepalive; aborting rolls it
    back at once, and its client is told TRANSACTION_EXPIRED.
    """
    found = await node.transactions()
    if action == "ls":
        output.listing("transactions", found)
        return
    chosen = next((each for each in found if each.txn_id == id), None)
    if chosen is None:
        step = "`streamingnode txn ls` names those that are"
        raise sn.errors.TransactionExpired(f"transaction {id} is not open — {step}")
    if not dry_run:
        await node.abort_transaction(chosen.txn_id)
    size = f"{format_count(chosen.bodies, 'message')}, {format_bytes(chosen.bytes)}"
    _print_change(output, "aborted", f"transaction {id} ({size})", chosen, dry_run)


def _print_change(output: Output, done: str, what: str, told: object, dry_run: bool) -> None:  # noqa: FBT001
    """Print what was done to something, or would be."""
    output.result(
        f"{'would be ' if dry_run else ''}{done}: {what}", {done: not dry_run, **fields_of(told)}
    )


@command(
    "streamingnode topic create data events",
    "streamingnode topic ls data",
    "streamingnode topic info data events --json",
    "streamingnode topic rm data events --dry-run",
    "streamingnode topic ls tcp://127.0.0.1:7600",
)
async def topic(
    output: Output,
    *,
    action: str = actions(create="topic", ls="", rm="topic", info="topic"),
    node: "sn.Node",
    topic: str | None = operand("the topic, for all but ls"),
    dry_run: bool = DRY_RUN,
) -> None:
    """Create, list, remove or show the topics of a node.

    Works beside a process that has the node open, when that takes clients. The lag of a group is
    how many messages it has not acknowledged. Removing a topic removes its messages and groups, for
    good; one that exists may be created again and stays as it is.
    """
    from wal.rocksmq.messages import check_name

    found = await node.mq.info()
    if topic is None:
        output.listing(
            "topics", [line_of_topic(name, info) for name, info in sorted(found.items())]
        )
    elif action == "create":
        was_there = topic in found
        if dry_run:
            check_name("topic", topic)
        else:
            await node.mq.create_topic(topic)  # there already or not: that needs the right to it
        text = f"{'would be ' if dry_run else ''}created: topic {topic}"
        if was_there:
            text = f"topic {topic} was there already"
        exists = was_there or not dry_run
        output.result(text, {"topic": topic, "exists": exists, "created": exists and not was_there})
    elif (info := found.get(topic)) is None:
        raise TopicNotFound(f"there is no topic {shown(topic)}")
    elif action == "info":
        groups = [
            {"group": name, **fields_of(group)} for name, group in sorted(info.groups.items())
        ]
        counts = {name: getattr(info, name) for name in COUNTS}
        output.show(line_of_topic(topic, info) | counts | {"groups": groups})
    else:
        if not dry_run:
            await node.mq.destroy_topic(topic)
        kept = (
            f"{format_count(info.end_id + 1 - info.begin_id, 'message')}, "
            f"{format_bytes(info.bytes)}"
        )
        names = ", ".join(sorted(info.groups)) or "none"
        what = f"topic {topic} ({kept}, groups: {names})"
        _print_change(output, "removed", what, line_of_topic(topic, info), dry_run)


@command(
    "streamingnode group ls data events",
    "streamingnode group info data events billing --json",
    "streamingnode group seek data events billing earliest --dry-run",
    "streamingnode group seek data events billing latest",
    "streamingnode group rm data events billing",
)
async def group(
    output: Output,
    *,
    action: str = actions(ls="topic", info="topic group", seek="topic group to", rm="topic group"),
    node: "sn.Node",
    topic: str = operand("the topic"),
    group: str | None = operand("the group, for all but ls"),
    to: str | None = operand("for seek: a message id, `earliest` or `latest`"),
    dry_run: bool = DRY_RUN,
) -> None:
    """List, show, move or remove the consumer groups of a topic.

    `seek` makes a message the next one that the group gets: all below it count as acknowledged, and
    what consumers hold is forgotten. `latest` is behind the last message. Removing a group lets
    retention give up what it kept.
    """
    info = (await node.mq.info()).get(topic)
    if info is None:
        raise TopicNotFound(f"there is no topic {shown(topic)}")
    if group is None:
        groups = [{"group": name, **fields_of(each)} for name, each in sorted(info.groups.items())]
        output.listing("groups", groups, topic=topic)
        return
    if group not in info.groups:
        raise GroupNotFound(f"topic {topic!r} has no group {shown(group)}")
    before = info.groups[group]
    if action == "info":
        output.show({"topic": topic, "group": group, **fields_of(before)})
    elif to is not None:
        target = _target(to, info)
        lag = info.end_id + 1 - target
        if not dry_run:
            await node.mq.seek(topic, group, target)
        verb = "would go" if dry_run else "went"
        output.result(
            f"group {group} {verb} from {before.current_id} to {target}: lag {before.lag} to {lag}",
            {"topic": topic, "group": group, "moved": not dry_run, "to": target, "lag": lag},
        )
    else:
        if not dry_run:
            await node.mq.destroy_consumer_group(topic, group)
        told = {"topic": topic, "group": group, **fields_of(before)}
        _print_change(output, "removed", f"group {group} (lag {before.lag})", told, dry_run)


@command(
    "streamingnode bridge data events orders",
    "streamingnode bridge data events orders --once --json",
    "streamingnode bridge tcp://127.0.0.1:7600 events orders --name orders-2",
)
def bridge(
    output: Output,
    *,
    place: Place,
    topic: str = operand("where messages come from"),
    collection: str = operand("where their rows go"),
    name: str | None = option(
        "of the consumer group and producer (default: bridge.TOPIC.COLLECTION)"
    ),
    once: bool = option("end when the topic is drained"),
) -> None:
    """Bring the messages of a topic into a collection, each exactly once.

    A body is an Arrow IPC stream or one JSON object. One that does not fit goes to the topic
    TOPIC.dead, with the error and where it came from in its properties. Can be interrupted and run
    again at any moment: it goes on where it was. Started twice, the first one ends. To bring the
    same messages again, give it another --name.
    """
    with Progress(output.stderr) as progress:
        progress.stage("bridging")
        run = partial(
            sn.bridge,
            topic=topic,
            collection=collection,
            name=name,
            once=once,
            on_progress=lambda now: progress.advance(
                now.messages, f"{now.rows} rows, {now.dead} dead letters"
            ),
        )
        report = with_node(place, run, lasting=not once)
    rows = format_count(report.rows, "row")
    dead = format_count(report.dead, "dead letter")
    output.result(
        f"{format_count(report.messages, 'message')}: {rows} in {collection}, {dead}", report
    )


@command(
    "streamingnode channel create data --role proxy --address host:1 -n 4",
    "streamingnode channel ls data --json",
    "streamingnode channel rm data channel_0 channel_1",
)
async def channel(
    output: Output,
    *,
    action: str = actions(create="--role", ls="[names]", rm="names [--dry-run]"),
    node: "sn.Node",
    names: list[str] = operand("the channels, for rm; for ls all by default"),
    role: str | None = option("for create: whose they are"),
    address: str = option("for create: where the owner is", default=""),
    description: str = option("for create: what for", default=""),
    number: int = option("for create: how many (default: 1)", "-n", "--number", default=1),
    dry_run: bool = DRY_RUN,
) -> None:
    """Create, list or remove the channels of a node's channel service.

    A channel is a topic with a name that no other has or had, and who owns it. Removing one removes
    its messages, too. Creating and removing several is all or nothing.
    """
    from streamingnode.streams.channels import OwnerDescription

    if action == "create":
        owner = OwnerDescription(str(role), address=address, description=description)
        found = await node.channels.describe_channels(
            await node.channels.create_channels(owner, number)
        )
    else:
        found = await node.channels.describe_channels(names or None)
        if action == "rm" and not dry_run:
            await node.channels.destroy_channels(names)
    told = [{"channel": each.name, **fields_of(each.owner)} for each in found]
    if action == "rm":
        _print_change(
            output, "removed", f"channels {', '.join(names)}", {"channels": told}, dry_run
        )
    else:
        output.listing("channels", told)


def _target(to: str, info: "TopicInfo") -> int:
    """Return the message id that is meant. Raises as `MessageQueue.seek` does."""
    if to in {"earliest", "latest"}:
        return info.begin_id if to == "earliest" else info.end_id + 1
    from wal.rocksmq.contract import check_place

    try:
        return check_place(int(to), (info.begin_id, info.end_id))
    except ValueError:
        raise InvalidArgument(
            f"{to!r} is no message id — give a number, `earliest` or `latest`"
        ) from None


def line_of_topic(name: str, info: "TopicInfo") -> dict[str, object]:
    """Return what is shown of a topic: no counts since the opening, and of the groups their lag."""
    told = {key: value for key, value in fields_of(info).items() if key not in {"groups", *COUNTS}}
    lag = {name: group.lag for name, group in sorted(info.groups.items())}
    return {"topic": name, "messages": info.end_id + 1 - info.begin_id, **told, "lag": lag}
