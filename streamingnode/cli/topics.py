"""Topics and channels on the command line: `topic`, `group`, `bridge` and `channel`."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamingnode.cli.command import DRY_RUN, PLACE, argument, command, with_node
from streamingnode.cli.output import Output, format_bytes, format_count
from streamingnode.progress import Progress
from wal.errors import GroupNotFound, InvalidArgument, TopicNotFound, Truncated, shown

if TYPE_CHECKING:
    from streamingnode.bridging import BridgeReport
    from streamingnode.node import Node
    from wal.rocksmq.contract import GroupInfo, TopicInfo


@command(
    argument("action", choices=["create", "ls", "rm", "info"], help="what to do"),
    PLACE,
    argument("topic", nargs="?", help="the topic, for all but ls"),
    DRY_RUN,
    examples=(
        "streamingnode topic create data events",
        "streamingnode topic ls data",
        "streamingnode topic info data events --json",
        "streamingnode topic rm data events --dry-run",
        "streamingnode topic ls tcp://127.0.0.1:7600",
    ),
)
def topic(output: Output, *, action: str, place: Path | str, topic: str | None, dry_run: bool) -> None:
    """Create, list, remove or show the topics of a node.

    Works beside a process that has the node open, when that takes clients. The lag of a group is how many messages it
    has not acknowledged. Removing a topic removes its messages and groups, for good; one that exists may be created
    again and stays as it is.
    """
    if (action == "ls") is not (topic is None):
        raise InvalidArgument(f"{action} takes {'no' if topic else 'a'} topic — see topic --help")
    if topic is None:
        found = with_node(place, lambda node: node.mq.info())
        listed = [_line_of(name, info) for name, info in sorted(found.items())]
        output.records(listed)
        output.document({"topics": listed})
        return

    async def apply(node: "Node") -> "TopicInfo | None":
        if action == "create" and not dry_run:
            await node.mq.create_topic(topic)
        info = await node.mq.info()
        if action == "rm" and topic in info and not dry_run:
            await node.mq.destroy_topic(topic)
        return info.get(topic)

    info = with_node(place, apply)
    if action == "create":
        output.line(f"topic {topic} {'is' if info else 'would be'} there")
        output.document({"topic": topic, "exists": info is not None})
        return
    if info is None:
        raise TopicNotFound(f"there is no topic {shown(topic)}")
    if action == "rm":
        kept = f"{format_count(info.end_id + 1 - info.begin_id, 'message')}, {format_bytes(info.bytes)}"
        names = ", ".join(sorted(info.groups)) or "none"
        output.line(f"{'would remove' if dry_run else 'removed'} topic {topic}: {kept}, groups: {names}")
        output.document({"removed": not dry_run, **_line_of(topic, info)})
    else:
        groups = [_group_line(name, group) for name, group in sorted(info.groups.items())]
        counts = {"produced": info.produced, "delivered": info.delivered, "acked": info.acked}
        output.show(_line_of(topic, info) | counts | {"groups": groups})


@command(
    argument("action", choices=["ls", "info", "seek", "rm"], help="what to do"),
    PLACE,
    argument("topic", help="the topic"),
    argument("group", nargs="?", help="the group, for all but ls"),
    argument("to", nargs="?", help="for seek: a message id, `earliest` or `latest`"),
    DRY_RUN,
    examples=(
        "streamingnode group ls data events",
        "streamingnode group info data events billing --json",
        "streamingnode group seek data events billing earliest --dry-run",
        "streamingnode group seek data events billing latest",
        "streamingnode group rm data events billing",
    ),
)
def group(
    output: Output, *, action: str, place: Path | str, topic: str, group: str | None, to: str | None, dry_run: bool
) -> None:
    """List, show, move or remove the consumer groups of a topic.

    `seek` makes a message the next one that the group gets: all below it count as acknowledged, and what consumers
    hold is forgotten. `latest` is behind the last message. Removing a group lets retention give up what it kept.
    """
    if (action == "ls") is not (group is None) or (action == "seek") is not (to is not None):
        takes = {"ls": "a topic alone", "seek": "a topic, a group and where to go"}.get(action, "a topic and a group")
        raise InvalidArgument(f"{action} takes {takes} — see group --help")

    async def apply(node: "Node") -> "tuple[TopicInfo, int, TopicInfo]":
        before = (await node.mq.info()).get(topic)
        if before is None:
            raise TopicNotFound(f"there is no topic {shown(topic)}")
        if group is not None and group not in before.groups:
            raise GroupNotFound(f"topic {topic!r} has no group {shown(group)}")
        target = before.begin_id if to is None else _target(to, before)
        change: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "seek": lambda: node.mq.seek(topic, str(group), target),
            "rm": lambda: node.mq.destroy_consumer_group(topic, str(group)),
        }
        if action in change and not dry_run:
            await change[action]()
        return before, target, (await node.mq.info())[topic]

    info, target, after = with_node(place, apply)
    if group is None:
        listed = [_group_line(name, each) for name, each in sorted(info.groups.items())]
        output.records(listed)
        output.document({"topic": topic, "groups": listed})
    elif action == "info":
        output.show({"topic": topic, **_group_line(group, info.groups[group])})
    elif action == "seek":
        before, lag = info.groups[group], info.end_id + 1 - target if dry_run else after.groups[group].lag
        verb = "would go" if dry_run else "went"
        output.line(f"group {group} {verb} from {before.current_id} to {target}: lag {before.lag} to {lag}")
        output.document({"topic": topic, "group": group, "moved": not dry_run, "to": target, "lag": lag})
    else:
        output.line(f"{'would remove' if dry_run else 'removed'} group {group}: lag {info.groups[group].lag}")
        output.document({"topic": topic, "removed": not dry_run, **_group_line(group, info.groups[group])})


@command(
    PLACE,
    argument("topic", help="where messages come from"),
    argument("collection", help="where their rows go"),
    argument("--name", help="of the consumer group and producer (default: bridge.TOPIC.COLLECTION)"),
    argument("--once", action="store_true", help="end when the topic is drained"),
    examples=(
        "streamingnode bridge data events orders",
        "streamingnode bridge data events orders --once --json",
        "streamingnode bridge tcp://127.0.0.1:7600 events orders --name orders-2",
    ),
)
def bridge(output: Output, *, place: Path | str, topic: str, collection: str, name: str | None, once: bool) -> None:
    """Bring the messages of a topic into a collection, each exactly once.

    A body is an Arrow IPC stream or one JSON object. One that does not fit goes to the topic TOPIC.dead, with the error
    and where it came from in its properties. Can be interrupted and run again at any moment: it goes on where it was.
    Started twice, the first one ends. To bring the same messages again, give it another --name.
    """
    import streamingnode as sn

    with Progress(output.stderr) as progress:
        progress.stage("bridging")

        def tell(report: "BridgeReport") -> None:
            progress.advance(report.messages, f"{report.rows} rows, {report.dead} dead letters")

        report = with_node(
            place, lambda node: sn.bridge(node, topic, collection, name=name, once=once, on_progress=tell)
        )
    output.line(
        f"{format_count(report.messages, 'message')}: {format_count(report.rows, 'row')} in {collection}, "
        f"{format_count(report.dead, 'dead letter')}"
    )
    output.document(report)


@command(
    argument("action", choices=["create", "ls", "rm"], help="what to do"),
    PLACE,
    argument("names", nargs="*", help="the channels, for rm; for ls all by default"),
    argument("--role", help="for create: whose they are"),
    argument("--address", default="", help="for create: where the owner is"),
    argument("--description", default="", help="for create: what for"),
    argument("-n", "--number", type=int, default=1, help="for create: how many (default: 1)"),
    DRY_RUN,
    examples=(
        "streamingnode channel create data --role proxy --address host:1 -n 4",
        "streamingnode channel ls data --json",
        "streamingnode channel rm data channel_0 channel_1",
    ),
)
def channel(
    output: Output,
    *,
    action: str,
    place: Path | str,
    names: list[str],
    role: str | None,
    number: int,
    dry_run: bool,
    **owner: str,
) -> None:
    """Create, list or remove the channels of a node's channel service.

    A channel is a topic with a name that no other has or had, and who owns it. Removing one removes its messages, too.
    Creating and removing several is all or nothing.
    """
    from msgspec.structs import asdict

    from streamingnode.streams.channels import ChannelDescription, OwnerDescription

    takes = {"create": "an owner, and no names", "ls": "names, or nothing", "rm": "names, and --dry-run"}[action]
    allowed = {"create": {(False, True)}, "ls": {(True, False), (False, False)}, "rm": {(True, False)}}[action]
    if (bool(names), role is not None) not in allowed or (dry_run and action != "rm"):
        raise InvalidArgument(f"{action} takes {takes} — see channel --help")

    async def apply(node: "Node") -> list[ChannelDescription]:
        if action == "create":
            made = await node.channels.create_channels(OwnerDescription(str(role), **owner), number)
            return await node.channels.describe_channels(made)
        found = await node.channels.describe_channels(names or None)
        if action == "rm" and not dry_run:
            await node.channels.destroy_channels(names)
        return found

    found = with_node(place, apply)
    listed = [{"channel": each.name} | asdict(each.owner) for each in found]
    output.records(listed)
    output.document({"channels": listed})


def _target(to: str, info: "TopicInfo") -> int:
    """Return the message id that is meant. Raises as `MessageQueue.seek` does."""
    if to in {"earliest", "latest"}:
        return info.begin_id if to == "earliest" else info.end_id + 1
    try:
        target = int(to)
    except ValueError:
        raise InvalidArgument(f"{to!r} is no message id — give a number, `earliest` or `latest`") from None
    if target < info.begin_id:
        raise Truncated(target, info.begin_id)
    if target > info.end_id + 1:
        raise InvalidArgument(f"{target} is yet to come — go to {info.end_id + 1} at most")
    return target


def _line_of(name: str, info: "TopicInfo") -> dict[str, object]:
    return {
        "topic": name,
        "begin_id": info.begin_id,
        "end_id": info.end_id,
        "messages": info.end_id + 1 - info.begin_id,
        "bytes": info.bytes,
        "pages": info.pages,
        "acked_pages": info.acked_pages,
        "lag": {name: group.lag for name, group in sorted(info.groups.items())},
    }


def _group_line(name: str, info: "GroupInfo") -> dict[str, object]:
    return {"group": name, "current_id": info.current_id, "lag": info.lag, "held": info.held}
