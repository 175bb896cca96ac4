"""Rows from files into real nodes: what goes in, what is refused, and repeated runs of a
producer.
"""

import datetime as dt
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import anyio
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import streamingnode as sn
from streamingnode.cli.rows_in import ROWS_MAX
from streamingnode.opening import open_node

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.streamingnode.cli.conftest import Printed

    Run = Callable[..., Printed]

ROOT = Path(__file__).resolve().parents[3]

NOON = dt.datetime(2026, 7, 1, 12, 0, 0, 1)  # noqa: DTZ001  # naive on purpose


def _items(printed: "Printed") -> dict[str, dict[str, object]]:
    collections = cast("list[dict[str, object]]", printed.document["collections"])
    return {str(collection["name"]): collection for collection in collections}


def _snapshot(path: Path, collection: str) -> list[dict[str, object]]:
    async def read() -> list[dict[str, object]]:
        async with open_node(path) as node:
            rows = await node.snapshot(collection)
            return rows.sort_by("id").select(["id", "item"]).to_pylist()

    return anyio.run(read)


def test_inserted_rows_are_counted_and_readable(data: Path, run: "Run") -> None:
    more = data.parent / "more.jsonl"
    more.write_text('{"id": 4, "item": "jam"}\n{"id": 5}\n')
    assert run("insert", data, "orders", more, "--json").document["rows"] == 2
    assert _snapshot(data, "orders")[3:] == [{"id": 4, "item": "jam"}, {"id": 5, "item": None}]


def test_upsert_replaces_the_row_of_the_key(data: Path, run: "Run") -> None:
    more = data.parent / "more.jsonl"
    more.write_text('{"id": 2, "item": "cream"}\n')
    assert run("insert", data, "orders", more, "--upsert").code == 0
    assert [row["item"] for row in _snapshot(data, "orders")] == ["tea", "cream", "salt"]


def test_bad_line_leaves_nothing_of_its_batch(data: Path, run: "Run") -> None:
    more = data.parent / "more.jsonl"
    more.write_text('{"id": 4, "item": "jam"}\n{"id": "five"}\n{"id": 6, "item": "rice"}\n')
    refused = run("insert", data, "orders", more)
    assert refused.code == 2
    assert "line 2: Expected `int | null`, got `str` - at `$.id`" in refused.err
    assert len(_snapshot(data, "orders")) == 3


def test_json_that_is_no_lines_is_answered_with_what_lines_are(data: Path, run: "Run") -> None:
    for text in ('[{"id": 4}]', '{"id": 4} {"id": 5}', '{\n"id": 4}'):
        (data.parent / "more.json").write_text(text)
        assert (
            "line 1: " in (refused := run("insert", data, "orders", data.parent / "more.json")).err
        )
        assert (
            " — each line must be one JSON object with the collection's columns; nothing of"
            in refused.err
        )


def test_texts_of_a_file_are_called_what_they_are_there(data: Path, run: "Run") -> None:
    pq.write_table(pa.table({"id": ["4"], "item": ["jam"]}), data.parent / "rows.parquet")
    refused = run("insert", data, "orders", data.parent / "rows.parquet")
    assert (
        refused.err
        == "SCHEMA_MISMATCH: column 'id' is string, the schema has int64 — cast it before the "
        "insert\n"
    )


def test_null_key_is_named_by_its_line(data: Path, run: "Run") -> None:
    more = data.parent / "more.jsonl"
    more.write_text('{"id": 4}\n\n{"item": "nobody"}\n')
    refused = run("insert", data, "orders", more)
    assert refused.code == 2
    assert "line 3" in refused.err
    assert len(_snapshot(data, "orders")) == 3


def test_batches_before_a_bad_line_stay_and_are_said(data: Path, run: "Run") -> None:
    more = data.parent / "more.jsonl"
    more.write_text("".join(f'{{"id": {i}}}\n' for i in range(10, 10 + ROWS_MAX)) + "oops\n")
    refused = run("insert", data, "orders", more)
    assert refused.code == 2
    assert f"line {ROWS_MAX + 1}: " in refused.err
    assert f"{ROWS_MAX} rows of earlier batches are inserted" in refused.err
    assert len(_snapshot(data, "orders")) == 3 + ROWS_MAX


@pytest.mark.usefixtures("default_interrupt")
def test_an_interrupt_tells_how_many_rows_are_inserted_and_that_more_may_be(data: Path) -> None:
    command = [sys.executable, "-m", "streamingnode", "insert", str(data), "orders"]
    with (
        sn.sync.open_node(data) as node,
        node.read("orders", sn.DeliverPolicy.latest()) as messages,
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as running,
    ):
        assert running.stdin is not None
        assert running.stderr is not None
        for number in (4, 5):  # when the second is there, the first has been acknowledged
            running.stdin.write(_lines(number, 1))
            running.stdin.flush()
            assert next(iter(messages)).num_rows == 1
        running.send_signal(signal.SIGINT)
        assert re.search(
            "[12] rows of earlier batches are inserted; the next batch may be, too",
            running.stderr.read(),
        )
    assert running.returncode == 130


def test_without_stdin_a_file_is_inserted_and_the_lack_is_named(data: Path) -> None:
    insert = f"{sys.executable} -m streamingnode insert {data} orders"
    file = subprocess.run(
        f"{insert} {data.parent / 'orders.jsonl'} <&-", cwd=ROOT, shell=True, check=False
    )
    assert file.returncode == 0
    refused = subprocess.run(
        f"{insert} - <&-", cwd=ROOT, shell=True, check=False, stderr=subprocess.PIPE, text=True
    )
    assert refused.returncode == 2
    assert (
        refused.stderr
        == "INVALID_ARGUMENT: stdin is closed — name a file, or send one through a pipe\n"
    )
    assert len(_snapshot(data, "orders")) == 6


def test_parquet_is_recognised_by_its_content(data: Path, run: "Run") -> None:
    file = data.parent / "rows.bin"
    columns: dict[str, object] = {"item": ["jam"], "id": pa.array([9], pa.uint16()), "_tick": [1]}
    pq.write_table(pa.table(columns), file)
    assert run("insert", data, "orders", file).code == 0
    assert _snapshot(data, "orders")[-1] == {"id": 9, "item": "jam"}


def test_truncated_parquet_is_refused(data: Path, run: "Run") -> None:
    file = data.parent / "rows.parquet"
    file.write_bytes(b"PAR1 and nothing else")
    refused = run("insert", data, "orders", file)
    assert refused.code == 1
    assert (
        refused.err == f"STORAGE_FAILED: {refused.err.removeprefix('STORAGE_FAILED: ').strip()}\n"
    )
    assert "cannot be read completely" in refused.err


@pytest.mark.parametrize(
    "columns, text",
    [
        (
            {"id": [1], "item": pa.array([NOON])},
            r"column 'item' is timestamp\[us\], the schema has string",
        ),
        ({"id": [1.0], "item": ["tea"]}, "column 'id' is double, the schema has int64"),
        (
            {"id": pa.array([1, 1 << 63], pa.uint64()), "item": ["a", "b"]},
            "column 'id', row 2: Integer value",
        ),
        ({"id": [1]}, "column 'item' is missing — give every column"),
        ({"item": ["tea"]}, "column 'id' is missing"),
        ({"id": [1], "item": ["tea"], "more": [1]}, "column 'more' is not in the schema"),
        ({"id": pa.array([1, None]), "item": ["a", "b"]}, "column 'id', row 2: null"),
    ],
    ids=[
        "times for text",
        "floats for integers",
        "too large",
        "no item",
        "no key",
        "one more",
        "null key",
    ],
)
def test_parquet_that_does_not_fit_the_collection_is_refused_by_column(
    data: Path, run: "Run", columns: dict[str, object], text: str
) -> None:
    file = data.parent / "rows.parquet"
    pq.write_table(pa.table(columns), file)
    refused = run("insert", data, "orders", file)
    assert refused.code == 2
    assert re.match(f"SCHEMA_MISMATCH: {text}", refused.err), refused.err
    assert len(_snapshot(data, "orders")) == 3


def test_times_of_a_parquet_file_come_back_equal_or_are_refused(tmp_path: Path, run: "Run") -> None:
    table = pa.table(
        {
            "id": [1, 2],
            "naive": [NOON, None],
            "aware": pa.array([NOON, None], pa.timestamp("us", "Asia/Tokyo")),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    made = run(
        "insert",
        tmp_path / "data",
        "c",
        tmp_path / "rows.parquet",
        "--create",
        "--primary-key",
        "id",
    )
    assert made.code == 0, made.err
    finer = table.set_column(1, "naive", pa.array([1, None], pa.timestamp("ns")))
    pq.write_table(finer, tmp_path / "finer.parquet")
    refused = run("insert", tmp_path / "data", "c", tmp_path / "finer.parquet")
    assert (
        "column 'naive', row 1: Casting from timestamp[ns] to timestamp[us] would lose data"
        in refused.err
    )

    async def read() -> pa.Table:
        async with open_node(tmp_path / "data") as node:
            return await node.snapshot("c")

    rows = anyio.run(read)
    assert rows.select(["id", "naive", "aware"]).to_pylist() == table.to_pylist()


def test_options_may_stand_between_the_arguments(data: Path, run: "Run") -> None:
    more = data.parent / "more.jsonl"
    more.write_text('{"id": 2, "item": "cream"}\n')
    assert (
        run(
            "insert", data, "--upsert", "orders", "--partition", "_default", more, "--json"
        ).document["rows"]
        == 1
    )
    assert run("tail", "--limit", "1", data, "--from", "start", "orders").code == 0
    assert [row["item"] for row in _snapshot(data, "orders")] == ["tea", "cream", "salt"]


def test_input_that_is_no_file_is_refused_in_one_line(data: Path, run: "Run") -> None:
    refused = run("insert", data, "orders", data)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "Is a directory" in refused.err


# --- insert --producer ----------------------------------------------------------------------------


def _feed(
    data: Path, run: "Run", lines: str, *options: str, name: str = "feed", into: str = "orders"
) -> "Printed":
    file = data.parent / "feed.jsonl"
    file.write_text(lines)
    return run("insert", data, into, "--producer", name, *options, file, "--json")


def _lines(first: int, count: int) -> str:
    return "".join(
        f'{{"id": {number}, "item": "i{number}"}}\n' for number in range(first, first + count)
    )


def test_repeated_run_of_a_producer_inserts_only_what_is_new(data: Path, run: "Run") -> None:
    for lines, rows, passed_over in (
        (_lines(10, 2), 2, 0),
        (_lines(10, 2), 0, 2),
        (_lines(10, 2) + "\n" + _lines(12, 1)[:-1], 1, 2),
        (_lines(10, 2) + "\n" + _lines(12, 3), 2, 4),
    ):
        done = _feed(data, run, lines)
        assert done.code == 0, done.err
        assert (done.document["rows"], done.document["passed_over"]) == (rows, passed_over)
    assert [row["id"] for row in _snapshot(data, "orders")] == [1, 2, 3, 10, 11, 12, 13, 14]


@pytest.mark.parametrize(
    "lines, into",
    [
        (_lines(10, 1), "orders"),
        (_lines(11, 2), "orders"),
        (_lines(9, 1) + _lines(10, 2), "orders"),
        ("\n" + _lines(10, 2), "orders"),
        (_lines(10, 2), "stock"),
    ],
    ids=["shorter", "other", "one before", "an empty line before", "another collection"],
)
def test_input_that_changed_before_the_last_line_is_refused(
    data: Path, run: "Run", lines: str, into: str
) -> None:
    assert _feed(data, run, _lines(10, 2)).code == 0
    assert (
        _feed(
            data, run, _lines(1, 1), "--create", "--primary-key", "id", name="other", into="stock"
        ).code
        == 0
    )
    refused = _feed(data, run, lines + _lines(20, 1), into=into)
    assert refused.code == 2
    assert "use another --producer for this one" in refused.err
    assert len(_snapshot(data, "orders")) == 5


def test_producer_of_a_program_is_not_taken_for_a_run_of_a_file(data: Path, run: "Run") -> None:
    async def write() -> None:
        async with open_node(data) as node:
            await (await node.producer("feed")).insert(
                "orders", [{"id": 9, "item": "jam"}], sequence=2
            )

    anyio.run(write)
    assert "of another input" in _feed(data, run, _lines(10, 3)).err


def test_run_goes_on_behind_a_refused_line_once_it_is_corrected(data: Path, run: "Run") -> None:
    refused = _feed(data, run, _lines(10, ROWS_MAX) + '{"id": null}\n')
    assert refused.code == 2
    assert f"line {ROWS_MAX + 1}" in refused.err
    done = _feed(data, run, _lines(10, ROWS_MAX + 2))
    assert (done.document["rows"], done.document["passed_over"]) == (2, ROWS_MAX)
    assert len(_snapshot(data, "orders")) == 3 + ROWS_MAX + 2


def test_repeated_run_of_a_parquet_file_is_exact_and_a_rewritten_one_refused(
    data: Path, run: "Run"
) -> None:
    file = data.parent / "rows.parquet"
    rows = {"id": list(range(10, 10 + ROWS_MAX + 5)), "item": ["x"] * (ROWS_MAX + 5)}
    pq.write_table(pa.table(rows), file)
    arguments = ("insert", data, "orders", file, "--producer", "feed", "--json")
    assert [run(*arguments).document["rows"] for _ in range(2)] == [ROWS_MAX + 5, 0]
    pq.write_table(pa.table(rows), file, compression="zstd")
    assert run(*arguments).code == 2
    assert len(_snapshot(data, "orders")) == 3 + ROWS_MAX + 5


@pytest.mark.parametrize("place", ["append.record_durable=kill@3", "append.synced=kill@3"])
def test_run_killed_between_note_and_rows_is_repeated_exactly(
    data: Path, run: "Run", place: str
) -> None:
    file = data.parent / "feed.jsonl"
    file.write_text(_lines(10, 3 * ROWS_MAX))
    command = [
        sys.executable,
        "-m",
        "streamingnode",
        "insert",
        str(data),
        "orders",
        str(file),
        "--producer",
        "feed",
    ]
    environment = {**os.environ, "STREAMINGNODE_FAILPOINTS": place}
    killed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = run("insert", data, "orders", file, "--producer", "feed", "--json")
    assert done.code == 0, done.err
    assert 0 < cast("int", done.document["rows"]) <= 3 * ROWS_MAX
    assert [row["id"] for row in _snapshot(data, "orders")] == [
        1,
        2,
        3,
        *range(10, 10 + 3 * ROWS_MAX),
    ]


def test_parquet_from_a_pipe_is_refused(data: Path) -> None:
    file = data.parent / "rows.parquet"
    pq.write_table(pa.table({"id": [7, 8], "item": ["a", "b"]}), file)
    command = [sys.executable, "-m", "streamingnode", "insert", str(data), "orders"]
    with (
        file.open("rb") as stream,
        subprocess.Popen(["cat"], stdin=stream, stdout=subprocess.PIPE) as pipe,
    ):
        refused = subprocess.run(
            command, cwd=ROOT, stdin=pipe.stdout, capture_output=True, text=True, check=False
        )
    assert (refused.returncode, "name the file" in refused.stderr) == (2, True)
    with file.open("rb") as stream:
        done = subprocess.run(
            command, cwd=ROOT, stdin=stream, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert len(_snapshot(data, "orders")) == 5


def test_unknown_collection_is_refused(data: Path, run: "Run") -> None:
    refused = run("insert", data, "order", data.parent / "orders.jsonl")
    assert refused.code == 1
    assert refused.err.startswith("COLLECTION_NOT_FOUND")


def test_create_without_a_key_is_refused_before_anything_is_made(
    tmp_path: Path, run: "Run"
) -> None:
    refused = run("insert", tmp_path / "new", "orders", tmp_path / "x.jsonl", "--create")
    assert refused.code == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "options, code, text",
    [
        (
            ("--primary-key", "item"),
            1,
            "ALREADY_EXISTS: .* primary key 'id' and 2 shards — leave out --create",
        ),
        (("--primary-key", "id", "--shards", "5"), 1, "ALREADY_EXISTS: .* 2 shards"),
    ],
    ids=["another key", "other shards"],
)
def test_create_of_another_collection_than_there_is_is_refused(
    data: Path, run: "Run", options: tuple[str, ...], code: int, text: str
) -> None:
    refused = run("insert", data, "orders", data.parent / "orders.jsonl", "--create", *options)
    assert refused.code == code
    assert re.match(text, refused.err)
    assert len(_snapshot(data, "orders")) == 3


def test_shards_of_0_are_refused(data: Path, run: "Run") -> None:
    rows = data.parent / "orders.jsonl"
    refused = run("insert", data, "new", rows, "--create", "--primary-key", "id", "--shards", "0")
    assert (refused.code, refused.err) == (2, "INVALID_ARGUMENT: shards is 0 — choose 1 to 256\n")


def test_missing_input_file_makes_no_node(tmp_path: Path, run: "Run") -> None:
    refused = run(
        "insert",
        tmp_path / "new",
        "orders",
        tmp_path / "x.jsonl",
        "--create",
        "--primary-key",
        "id",
    )
    assert refused.code == 2
    assert not (tmp_path / "new").exists()
