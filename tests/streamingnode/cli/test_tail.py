"""Where `tail` starts and ends, and in which form it prints: in a closed directory, beside `serve`,
and over TCP.
"""

import io
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import streamingnode as sn
from streamingnode.cli import main
from streamingnode.cli.data import start_policy
from wal.errors import InvalidArgument
from wal.position import RocksMessageId
from wal.timetick import add_ms, time_to_tick

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.streamingnode.cli.conftest import Place, Printed

    Run = Callable[..., Printed]


def ids_of(printed: "Printed") -> list[object]:
    assert printed.code == 0, printed.err
    return [line["rows"][0]["id"] if line.get("rows") else line["type"] for line in printed.lines]  # type: ignore[index]


@pytest.fixture
def ticks(place: "Place") -> list[int]:
    """The ticks of the inserts of three rows with ids 1 to 3."""
    with place.open() as node:
        return [
            node.insert(place.orders, [{"id": key, "item": "tea"}]).time_tick for key in (1, 2, 3)
        ]


def test_tail_starts_and_ends_where_it_is_told(
    place: "Place", ticks: list[int], run: "Run"
) -> None:
    tail = ("tail", *place.arguments, place.orders)
    everything = ["create_collection", 1, 2, 3]
    second = run(*tail, "--from", "-2", "-n", "1").lines[0]
    for start, expected in (
        ("earliest", everything),
        ("latest", []),
        ("-1", [3]),
        ("-3", [1, 2, 3]),
        ("-99", everything),
        ("@1h", everything),
        (datetime.now(UTC).isoformat(), []),
        (f"tick:{ticks[1]}", [3]),
        (f"id:{second['message_id']}", [2, 3]),
    ):
        assert ids_of(run(*tail, "--from", start)) == expected, start
    assert ids_of(run(*tail, "--until", f"tick:{ticks[1]}")) == everything[:3]
    assert ids_of(run(*tail, "--until", "@1h")) == []
    assert ids_of(run(*tail, "--from", "-1", "--until", str(ticks[1]))) == [2]
    assert ids_of(run(*tail, "--from", "-1", "--types", "create_collection")) == everything[:1]
    assert ids_of(run(*tail, "--follow", "-n", "2")) == everything[:2]
    assert ids_of(run(*tail, "--follow", "--until", str(ticks[2]))) == everything


def test_the_last_messages_are_found_however_long_ago_they_came(
    data: object, run: "Run", monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[object]()
    read = sn.Node.read

    def counted(
        node: sn.Node, collection: str, policy: sn.DeliverPolicy, **options: object
    ) -> object:
        looks.append(policy)
        return read(node, collection, policy, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(sn.Node, "read", counted)
    monkeypatch.setattr("streamingnode.cli.data.BACK_MS", 1)
    shown = run("tail", data, "orders", "--from", "-3").lines
    assert [line["type"] for line in shown] == ["create_collection", "insert"]
    assert len(looks) > 3
    assert looks[-2] == sn.DeliverPolicy.all(), (
        "it gave up looking only at the beginning of the log"
    )


def test_a_table_has_a_line_for_each_row_and_each_key(
    place: "Place", ticks: list[int], run: "Run"
) -> None:
    with place.open() as node:
        node.delete(place.orders, [1, 2])
    lines = run(
        "tail", *place.arguments, place.orders, "--from", "-2", "-o", "table"
    ).out.splitlines()
    assert [line.split()[2:] for line in lines] == [
        ["insert", '{"id":3,"item":"tea"}'],
        ["delete", '{"id":1}'],
        ["delete", '{"id":2}'],
    ]


def test_arrow_has_the_rows_and_keys_with_tick_and_type(
    place: "Place", ticks: list[int], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with place.open() as node:
        upserted = node.upsert(place.orders, [{"id": 3, "item": "milk"}]).time_tick
    assert main(["tail", *place.arguments, place.orders, "--from", "-2", "-o", "arrow"]) == 0
    with pa.ipc.open_stream(io.BytesIO(capfdbinary.readouterr().out)) as stream:
        found = pa.Table.from_batches(batches := list(stream))
    assert all(batch.num_rows for batch in batches)
    assert found.to_pylist() == [
        {"_tick": ticks[2], "_type": "insert", "id": 3, "item": "tea"},
        {"_tick": upserted, "_type": "delete", "id": 3, "item": None},
        {"_tick": upserted, "_type": "insert", "id": 3, "item": "milk"},
    ]


def test_arrow_is_not_printed_to_a_terminal_and_not_as_json(
    data: object, run: "Run", monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("tail", data, "orders", "-o", "arrow", "--json").code == 2
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    refused = run("tail", data, "orders", "-o", "arrow")
    assert (refused.code, refused.out) == (2, "")
    assert "a terminal cannot show Arrow — " in refused.err


def test_a_position_is_what_it_says() -> None:
    moment = datetime(2026, 11, 24, 10, tzinfo=UTC)
    start_after = sn.DeliverPolicy.start_after
    for text, expected in (
        ("start", sn.DeliverPolicy.all()),
        ("end", sn.DeliverPolicy.latest()),
        ("7", start_after(7)),
        ("tick:7", start_after(7)),
        ("rocks/1a", sn.DeliverPolicy.start_from(RocksMessageId(46))),
        ("id:rocks/1a", sn.DeliverPolicy.start_from(RocksMessageId(46))),
        ("2026-11-24T10:00:00Z", start_after(time_to_tick(moment) - 1)),
        ("@2026-11-24T11:00:00+01:00", start_after(time_to_tick(moment) - 1)),
    ):
        assert start_policy(text) == expected, text
    ago = start_policy("@2d").at
    now = time_to_tick(datetime.now(UTC))
    assert isinstance(ago, int)
    assert (
        add_ms(ago, 2 * 86_400_000)
        <= now
        < add_ms(ago, int(timedelta(days=2, hours=1) / timedelta(milliseconds=1)))
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@",
        "@1",
        "@1w",
        "@-1h",
        "tick:",
        "tick:x",
        "id:7",
        "-5",
        "1.5",
        "2026-11-24T10:00:00",
        "@" + "9" * 30 + "d",
    ],
)
def test_what_is_no_position_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(
        InvalidArgument, match=r"^--from .* — give earliest, latest, @1h, a time such as"
    ):
        start_policy(text)


@pytest.mark.parametrize(
    "start, said",
    [
        ("2099-01-01T00:00:00Z", "— give one that has passed, or start at the end (latest)"),
        ("2026-01-01T00:00:00", "the time has no zone: add Z for UTC, or an offset"),
    ],
    ids=["to come", "no zone"],
)
def test_a_time_that_cannot_be_read_from_is_answered_with_one_that_can(
    data: object, run: "Run", start: str, said: str
) -> None:
    refused = run("tail", data, "orders", "--from", start)
    assert refused.code == 2
    assert said in refused.err
