"""`topic`, `group` and `channel`, in a closed node's directory and beside a process that has it
open.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import streamingnode as sn
from wal.errors import AlreadyOwned, InvalidArgument, TopicNotFound
from wal.files import LOCK_NAME

if TYPE_CHECKING:
    from tests.streamingnode.cli.conftest import Printed

    Run = Callable[..., Printed]


def listening(takes_clients: bool) -> dict[str, Any]:
    return {"serve.listen": takes_clients}


@pytest.fixture
def ids(data: Path) -> range:
    """The ids of three messages in topic `events`; group `billing` has acknowledged the first."""
    with sn.sync.open_node(data) as node:
        node.mq.create_topic("events")
        node.mq.create_consumer_group("events", "billing")
        found: range = node.mq.produce("events", [b"0", b"1", b"2"])
        node.mq.ack("events", "billing", [found[0]])
        return found


@pytest.fixture(params=["closed", "open"])
def place(data: Path, ids: range, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A node, closed, or open in this process with clients let in."""
    if request.param == "closed":
        yield data
    else:
        with sn.sync.open_node(data, **listening(True)):
            yield data


def test_a_topic_is_made_listed_shown_and_removed(place: Path, run: "Run") -> None:
    assert (
        run("topic", "create", place, "news", "--dry-run").out == "would be created: topic news\n"
    )
    not_made = {"topic": "news", "exists": False, "created": False}
    assert run("topic", "create", place, "news", "--dry-run", "--json").document == not_made
    assert run("topic", "create", place, "news").out == "created: topic news\n"
    there = {"topic": "news", "exists": True, "created": False}
    for options in ((), ("--dry-run",)):
        again = run("topic", "create", place, "news", *options)
        assert (again.code, again.out) == (0, "topic news already existed\n")
        assert run("topic", "create", place, "news", *options, "--json").document == there
    assert run("topic", "create", place, "other", "--json").document == there | {
        "topic": "other",
        "created": True,
    }
    assert run("topic", "rm", place, "other").code == 0
    listed: Any = run("topic", "ls", place, "--json").document["topics"]
    assert [(each["topic"], each["messages"], each["lag"]) for each in listed] == [
        ("events", 3, {"billing": 2}),
        ("news", 0, {}),
    ]
    shown: Any = run("topic", "info", place, "events", "--json").document
    assert (shown["messages"], shown["groups"][0]["group"], shown["groups"][0]["lag"]) == (
        3,
        "billing",
        2,
    )
    told = "removed: topic events (3 messages, 3 B, groups: billing)\n"
    assert run("topic", "rm", place, "events", "--dry-run").out == f"would be {told}"
    assert run("topic", "rm", place, "events").out == told
    assert "events" not in run("topic", "ls", place).out


def test_a_group_is_listed_moved_and_removed(place: Path, ids: range, run: "Run") -> None:
    listed: Any = run("group", "ls", place, "events", "--json").document["groups"]
    assert listed == [{"group": "billing", "current_id": ids[1], "lag": 2, "held": 0}]
    told = f"group billing would go from {ids[1]} to {ids[2]}: lag 2 to 1\n"
    assert run("group", "seek", place, "events", "billing", ids[2], "--dry-run").out == told
    assert run("group", "info", place, "events", "billing", "--json").document["lag"] == 2
    assert run("group", "seek", place, "events", "billing", "latest", "--json").document["lag"] == 0
    assert run("group", "seek", place, "events", "billing", "earliest").out.endswith("lag 0 to 3\n")
    assert (
        run("group", "rm", place, "events", "billing", "--dry-run").out
        == "would be removed: group billing (lag 3)\n"
    )
    assert run("group", "rm", place, "events", "billing").out == "removed: group billing (lag 3)\n"
    assert run("group", "ls", place, "events", "--json").document["groups"] == []


@pytest.mark.parametrize(
    "arguments, code",
    [
        (("topic", "info", "no"), TopicNotFound.code),
        (("topic", "rm", "no"), TopicNotFound.code),
        (("topic", "ls", "events"), InvalidArgument.code),
        (("topic", "info"), InvalidArgument.code),
        (("topic", "create", "a/b"), InvalidArgument.code),
        (("topic", "create", "a/b", "--dry-run"), InvalidArgument.code),
        (("group", "ls", "no"), TopicNotFound.code),
        (("group", "info", "events", "no"), "GROUP_NOT_FOUND"),
        (("group", "seek", "events", "billing"), InvalidArgument.code),
        (("group", "seek", "events", "billing", "soon"), InvalidArgument.code),
        (("group", "seek", "events", "billing", 1, "--dry-run"), "TRUNCATED"),
        (("group", "seek", "events", "billing", 1 << 62), InvalidArgument.code),
        (("group", "rm", "events"), InvalidArgument.code),
    ],
)
def test_wrong_use_is_refused_and_changes_nothing(
    data: Path, ids: range, run: "Run", arguments: tuple[object, ...], code: str
) -> None:
    verb, action, *rest = arguments
    ended = run(verb, action, data, *rest)
    assert ended.code == (2 if code == InvalidArgument.code else 1)
    assert ended.err.startswith(f"{code}: ")
    shown: Any = run("topic", "ls", data, "--json").document["topics"]
    assert [(each["topic"], each["lag"]) for each in shown] == [("events", {"billing": 2})]


def test_beside_a_node_that_takes_no_clients_the_verbs_end_with_the_exit_code_for_that(
    data: Path, ids: range, run: "Run"
) -> None:
    with sn.sync.open_node(data, **listening(False)):
        os.utime(data / LOCK_NAME, (0, 0))  # long ago: it is not just opening
        assert run("topic", "ls", data).code == AlreadyOwned.exit_code


def test_info_and_statistics_tell_the_lag_of_every_group(
    data: Path, ids: range, run: "Run"
) -> None:
    shown: Any = run("info", "show", data, "--json").document["topics"]
    about = {"topic": "events", "messages": 3, "begin_id": ids[0], "end_id": ids[2], "bytes": 3}
    assert shown == [{**about, "pages": 0, "acked_pages": 0, "lag": {"billing": 2}}]
    with sn.sync.open_node(data) as node:
        node.mq.info()
        assert node.statistics().topics["events"].groups["billing"].lag == 2


def test_a_bridge_drains_a_topic_into_a_collection_once(place: Path, run: "Run") -> None:
    done = run("bridge", place, "events", "orders", "--once", "--json")
    assert done.code == 0, done.err
    assert (done.document["messages"], done.document["rows"], done.document["dead"]) == (3, 0, 3)
    assert (
        run("bridge", place, "events", "orders", "--once").out
        == "0 messages: 0 rows in orders, 0 dead letters\n"
    )
    dead: Any = run("topic", "info", place, "events.dead", "--json").document
    assert dead["messages"] == 3
    assert run("bridge", place, "no", "orders", "--once").err.startswith(TopicNotFound.code)


def test_channels_are_made_listed_and_removed_all_or_none(place: Path, run: "Run") -> None:
    made: Any = run(
        "channel", "create", place, "--role", "proxy", "--address", "host:1", "-n", "2", "--json"
    ).document
    names = [each["channel"] for each in made["channels"]]
    assert made["channels"][0] == {
        "channel": names[0],
        "role": "proxy",
        "address": "host:1",
        "description": "",
    }
    assert names[1] in run("channel", "ls", place).out
    assert run("channel", "rm", place, names[0], "nobody").err.startswith(TopicNotFound.code)
    told = f"removed: channels {', '.join(names)}\n"
    assert run("channel", "rm", place, *names, "--dry-run").out == f"would be {told}"
    assert run("channel", "rm", place, *names).out == told
    assert run("channel", "ls", place, "--json").document == {"channels": []}


@pytest.mark.parametrize(
    "wrong",
    [
        ["create"],
        ["create", "x", "--role", "r"],
        ["rm"],
        ["ls", "--role", "r"],
        ["ls", "--dry-run"],
    ],
)
def test_what_an_action_on_channels_does_not_take_is_refused(
    data: Path, run: "Run", wrong: list[str]
) -> None:
    assert run("channel", wrong[0], data, *wrong[1:]).err.startswith(InvalidArgument.code)
