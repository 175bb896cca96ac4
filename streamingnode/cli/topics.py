"""The commands for topics, consumer groups and channels, and `bridge`."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

import streamingnode as sn
from streamingnode.cli.command import DRY_RUN, PROGRAM, Place, at_node, at_place, group, with_node
from streamingnode.cli.output import Output, fields_of, format_bytes, format_count
from streamingnode.progress import Progress
from wal.errors import GroupNotFound, InvalidArgument, TopicNotFound, shown

if TYPE_CHECKING:
    from wal.rocksmq.contract import GroupInfo, TopicInfo

COUNTS = "produced", "delivered", "acked"

TOPIC = group("topic", "List, create, show or remove the topics of a node.")
_TOPIC = click.argument("topic", help="The topic.")


@TOPIC.verb(
    "ls",
    "streamingnode topic ls data",
    "streamingnode topic ls tcp://127.0.0.1:7600 --json",
)
@at_node
async def list_topics(output: Output, node: "sn.Node") -> None:
    """List the topics of a node.

    The lag of a group is how many messages it has not acknowledged.
    """
    found = await node.mq.info()
    lines = [line_of_topic(name, info) for name, info in sorted(found.items())]
    output.listing("topics", lines)


@TOPIC.verb(
    "create",
    "streamingnode topic create data events",
    "streamingnode topic create data events --dry-run --json",
)
@at_node
@_TOPIC
@DRY_RUN
async def create_topic(output: Output, node: "sn.Node", *, topic: str, dry_run: bool) -> None:
    """Create a topic; an existing one is not changed."""
    from wal.rocksmq.messages import check_name

    was_there = topic in await node.mq.info()
    if dry_run:
        check_name("topic", topic)
    else:
        # even if the topic exists: this checks the right to create it
        await node.mq.create_topic(topic)
    text = f"{'would be ' if dry_run else ''}created: topic {topic}"
    if was_there:
        text = f"topic {topic} already existed"
    exists = was_there or not dry_run
    output.result(text, {"topic": topic, "exists": exists, "created": exists and not was_there})


@TOPIC.verb(
    "info",
    "streamingnode topic info data events",
    "streamingnode topic info data events --json",
)
@at_node
@_TOPIC
async def show_topic(output: Output, node: "sn.Node", *, topic: str) -> None:
    """Show a topic and its consumer groups."""
    info = await _topic_of(node, topic)
    groups = [{"group": name, **fields_of(each)} for name, each in sorted(info.groups.items())]
    counts = {name: getattr(info, name) for name in COUNTS}
    output.show(line_of_topic(topic, info) | counts | {"groups": groups})


@TOPIC.verb(
    "rm",
    "streamingnode topic rm data events --dry-run",
    "streamingnode topic rm data events --json",
)
@at_node
@_TOPIC
@DRY_RUN
async def remove_topic(output: Output, node: "sn.Node", *, topic: str, dry_run: bool) -> None:
    """Remove a topic with its messages and groups; this cannot be undone."""
    info = await _topic_of(node, topic)
    if not dry_run:
        await node.mq.destroy_topic(topic)
    kept = f"{format_count(info.end_id + 1 - info.begin_id, 'message')}, {format_bytes(info.bytes)}"
    names = ", ".join(sorted(info.groups)) or "none"
    what = f"topic {topic} ({kept}, groups: {names})"
    output.change("removed", what, line_of_topic(topic, info), dry_run=dry_run)


async def _topic_of(node: "sn.Node", topic: str) -> "TopicInfo":
    """Return a topic. Raises `TopicNotFound`."""
    info = (await node.mq.info()).get(topic)
    if info is None:
        raise TopicNotFound(f"there is no topic {shown(topic)}")
    return info


def line_of_topic(name: str, info: "TopicInfo") -> dict[str, object]:
    """Return the line of a topic in a list: without the counts since the opening, and with the lag
    of each group.
    """
    document = {
        key: value for key, value in fields_of(info).items() if key not in {"groups", *COUNTS}
    }
    lag = {name: group.lag for name, group in sorted(info.groups.items())}
    return {"topic": name, "messages": info.end_id + 1 - info.begin_id, **document, "lag": lag}


GROUP = group("group", "List, show, move or remove the consumer groups of a topic.")
_GROUP = click.argument("group", help="The consumer group.")


@GROUP.verb(
    "ls",
    "streamingnode group ls data events",
    "streamingnode group ls data events --json",
)
@at_node
@_TOPIC
async def list_groups(output: Output, node: "sn.Node", *, topic: str) -> None:
    """List the consumer groups of a topic."""
    info = await _topic_of(node, topic)
    groups = [{"group": name, **fields_of(each)} for name, each in sorted(info.groups.items())]
    output.listing("groups", groups, topic=topic)


@GROUP.verb(
    "info",
    "streamingnode group info data events billing",
    "streamingnode group info data events billing --json",
)
@at_node
@_TOPIC
@_GROUP
async def show_group(output: Output, node: "sn.Node", *, topic: str, group: str) -> None:
    """Show a consumer group."""
    found = _group_of(await _topic_of(node, topic), topic, group)
    output.show({"topic": topic, "group": group, **fields_of(found)})


@GROUP.verb(
    "seek",
    "streamingnode group seek data events billing earliest --dry-run",
    "streamingnode group seek data events billing latest",
    "streamingnode group seek data events billing latest --json",
)
@at_node
@_TOPIC
@_GROUP
@click.argument("to", help="A message id, `earliest` or `latest`.")
@DRY_RUN
async def seek_group(
    output: Output, node: "sn.Node", *, topic: str, group: str, to: str, dry_run: bool
) -> None:
    """Make a message the next one that a consumer group gets.

    All messages below it count as acknowledged, and messages that consumers hold are released.
    `latest` is after the last message.
    """
    info = await _topic_of(node, topic)
    before = _group_of(info, topic, group)
    target = _target(to, info)
    lag = info.end_id + 1 - target
    if not dry_run:
        await node.mq.seek(topic, group, target)
    verb = "would go" if dry_run else "went"
    output.result(
        f"group {group} {verb} from {before.current_id} to {target}: lag {before.lag} to {lag}",
        {"topic": topic, "group": group, "moved": not dry_run, "to": target, "lag": lag},
    )


@GROUP.verb(
    "rm",
    "streamingnode group rm data events billing",
    "streamingnode group rm data events billing --dry-run --json",
)
@at_node
@_TOPIC
@_GROUP
@DRY_RUN
async def remove_group(
    output: Output, node: "sn.Node", *, topic: str, group: str, dry_run: bool
) -> None:
    """Remove a consumer group: retention may then delete what it kept."""
    before = _group_of(await _topic_of(node, topic), topic, group)
    if not dry_run:
        await node.mq.destroy_consumer_group(topic, group)
    document = {"topic": topic, "group": group, **fields_of(before)}
    output.change("removed", f"group {group} (lag {before.lag})", document, dry_run=dry_run)


def _group_of(info: "TopicInfo", topic: str, group: str) -> "GroupInfo":
    """Return a group of a topic. Raises `GroupNotFound`."""
    if group not in info.groups:
        raise GroupNotFound(f"topic {topic!r} has no group {shown(group)}")
    return info.groups[group]


def _target(to: str, info: "TopicInfo") -> int:
    """Return the message id of an id, `earliest` or `latest`. Raises as `MessageQueue.seek`
    does.
    """
    if to in {"earliest", "latest"}:
        return info.begin_id if to == "earliest" else info.end_id + 1
    from wal.rocksmq.contract import check_place

    try:
        return check_place(int(to), (info.begin_id, info.end_id))
    except ValueError:
        raise InvalidArgument(
            f"{to!r} is not a message id — give a number, `earliest` or `latest`"
        ) from None


CHANNEL = group("channel", "List, create or remove the channels of a node's channel service.")


@CHANNEL.verb(
    "ls",
    "streamingnode channel ls data",
    "streamingnode channel ls data channel_0 --json",
)
@at_node
@click.argument("names", nargs=-1, help="The channels (default: all).")
async def list_channels(output: Output, node: "sn.Node", *, names: tuple[str, ...]) -> None:
    """List channels and who owns them."""
    await _print_channels(output, node, names or None)


@CHANNEL.verb(
    "create",
    "streamingnode channel create data --role proxy --address host:1 -n 4",
    "streamingnode channel create data --role proxy --json",
)
@at_node
@click.option("--role", required=True, help="Whose they are.")
@click.option("--address", default="", help="Where the owner is.")
@click.option("--description", default="", help="What for.")
@click.option("-n", "--number", default=1, help="How many (default: 1).")
async def create_channels(
    output: Output, node: "sn.Node", *, role: str, address: str, description: str, number: int
) -> None:
    """Create channels, all or none.

    A channel is a topic with an owner and a name that is never reused.
    """
    from streamingnode.streams.channels import OwnerDescription

    owner = OwnerDescription(role, address=address, description=description)
    await _print_channels(output, node, await node.channels.create_channels(owner, number))


@CHANNEL.verb(
    "rm",
    "streamingnode channel rm data channel_0 channel_1",
    "streamingnode channel rm data channel_0 --dry-run --json",
)
@at_node
@click.argument("names", nargs=-1, required=True, help="The channels.")
@DRY_RUN
async def remove_channels(
    output: Output, node: "sn.Node", *, names: tuple[str, ...], dry_run: bool
) -> None:
    """Remove channels with their messages, all or none."""
    document = await _channels_of(node, names)
    if not dry_run:
        await node.channels.destroy_channels(names)
    output.change(
        "removed", f"channels {', '.join(names)}", {"channels": document}, dry_run=dry_run
    )


async def _channels_of(node: "sn.Node", names: Sequence[str] | None) -> list[dict[str, object]]:
    found = await node.channels.describe_channels(names)
    return [{"channel": each.name, **fields_of(each.owner)} for each in found]


async def _print_channels(output: Output, node: "sn.Node", names: Sequence[str] | None) -> None:
    output.listing("channels", await _channels_of(node, names))


@PROGRAM.verb(
    "bridge",
    "streamingnode bridge data events orders",
    "streamingnode bridge data events orders --once --json",
    "streamingnode bridge tcp://127.0.0.1:7600 events orders --name orders-2",
)
@at_place()
@click.argument("topic", help="The topic to read messages from.")
@click.argument("collection", help="The collection to write the rows to.")
@click.option(
    "--name", help="Name of the consumer group and the producer (default: bridge.TOPIC.COLLECTION)."
)
@click.option("--once", is_flag=True, help="End when the topic is drained.")
def bridge(
    output: Output, *, place: Place, topic: str, collection: str, name: str | None, once: bool
) -> None:
    """Bring the messages of a topic into a collection, each exactly once.

    A body is an Arrow IPC stream or one JSON object. A body that does not fit goes to the topic
    TOPIC.dead, with the error and its origin in its properties. The bridge can be interrupted and
    run again at any moment: it continues where it was. If it is started twice, the first one ends.
    To bring the same messages again, use another --name.
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
