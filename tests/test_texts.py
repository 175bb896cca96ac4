"""What errors, events and the command line say: no more of a row than its begin, and one line
whatever is in a name.
"""

import datetime as dt
import io
import json
import logging
import traceback
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import streamingnode as sn
from streamingnode.cli import main
from streamingnode.cli.output import Output, to_json
from wal.errors import (
    SHOWN_MAX,
    Corrupt,
    InvalidArgument,
    StorageFailed,
    StreamingNodeError,
    brief,
    escaped,
    shown,
)
from wal.runtime import event_log

SECRET = "hunter2"
LONG = "x" * SHOWN_MAX + SECRET
FORGED = "\n2026-01-01 error event=forged \x1b[2J\x9b31m\r\u202e\u2028"


class Hostile:
    def __repr__(self) -> str:
        return LONG + FORGED


HOSTILE: tuple[object, ...] = (
    LONG,
    LONG.encode(),
    FORGED,
    FORGED.encode(),
    [LONG],
    [FORGED] * 3,
    {"a": LONG},
    {"a" + LONG: 1},
    {FORGED: FORGED},
    (LONG, FORGED),
    10**5000,
    -(10**70),
    1.5,
    Decimal("1e40"),
    dt.datetime(9999, 12, 31, tzinfo=dt.UTC),
    object(),
    Hostile(),
)
ARRAYS = (
    pa.array([LONG]),
    pa.array([LONG.encode()]),
    pa.array([LONG]).dictionary_encode(),
    pa.array([[LONG]]),
)
TYPES: tuple[pa.DataType, ...] = (
    pa.int8(),
    pa.int64(),
    pa.float32(),
    pa.bool_(),
    pa.string(),
    pa.binary(),
    pa.date32(),
    pa.timestamp("us"),
    pa.decimal128(10, 2),
    pa.list_(pa.int32()),
    pa.list_(pa.string()),
    pa.struct([pa.field("a", pa.int32())]),
)


def check(error: BaseException) -> None:
    """Look at an error as a log shows it: its text, and the traceback with what it came from."""
    assert isinstance(error, StreamingNodeError), repr(error)
    assert str(error).isprintable(), str(error)
    assert error.happened.isprintable()
    assert SECRET not in str(error)
    told = "".join(traceback.format_exception_only(error))
    while True:
        context = None if error.__suppress_context__ else error.__context__
        cause = error.__cause__ or context
        if cause is None:
            break
        error = cause
        told += "".join(traceback.format_exception_only(error))
    assert SECRET not in told, told


def refused(call: Callable[[], object]) -> bool:
    """Return whether a call was refused; if so, look at how."""
    try:
        call()
    except Exception as error:
        check(error)
        return True
    return False


def test_no_refusal_of_rows_tells_more_than_their_first_characters() -> None:
    count = 0
    with sn.sync.open_node(None) as opened:
        node: Any = opened
        for number, kind in enumerate(TYPES):
            name = f"c{number}"
            fields = [pa.field("id", pa.int64()), pa.field("value", kind)]
            node.create_collection(name, pa.schema(fields), primary_key="id")
            for value in HOSTILE:
                count += refused(partial(node.insert, name, [{"id": 1, "value": value}]))
                count += refused(partial(node.upsert, name, [{"id": value, "value": None}]))
                count += refused(
                    partial(node.insert, name, [{"id": 1, "value": None, shown(value) + LONG: 1}])
                )
                count += refused(partial(node.delete, name, [value]))
                count += refused(partial(node.insert, name, [value]))
                count += refused(partial(node.insert, name, value))
            for given in ARRAYS:
                nulls: Any = pa.array([None], kind)
                for table in (
                    pa.table({"id": [1], "value": given}),
                    pa.table({"id": given, "value": nulls}),
                ):
                    count += refused(partial(node.insert, name, table))
    assert count > 500


def test_no_refusal_of_names_and_arguments_begins_a_line(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64())])
    with sn.sync.open_node(tmp_path / "node") as opened:
        node: Any = opened
        node.create_collection("c", schema, primary_key="id")
        for text in (FORGED, LONG * 100 + FORGED, f"a{FORGED}"):
            named = pa.schema([pa.field(text, pa.int64())])
            for call in (
                partial(node.create_collection, text, schema, primary_key="id"),
                partial(node.create_collection, "d", schema, primary_key=text),
                partial(node.create_collection, "d", named, primary_key=text),
                partial(node.create_partition, "c", text),
                partial(node.drop_partition, "c", text),
                partial(node.collection, text),
                partial(node.insert, text, [{"id": 1}]),
                partial(node.insert, "c", [{"id": 1}], partition=text),
                partial(node.producer, text),
                partial(node.backup, tmp_path / "node" / text[:60]),
                partial(sn.load_config, arguments={text: 1}),
                partial(sn.load_config, arguments={"durability": text}),
                partial(sn.load_config, file=tmp_path / text[:60]),
            ):
                with pytest.raises(StreamingNodeError) as refusal:
                    call()
                assert str(refusal.value).isprintable(), str(refusal.value)


@pytest.mark.parametrize(
    "command",
    [
        "collection ls",
        "info show",
        "verify",
        "flush",
        "doctor",
        "tail",
        "restore",
        "backup",
        "export",
    ],
)
@pytest.mark.parametrize("debug", [[], ["--debug"]], ids=["", "debug"])
def test_a_command_on_a_hostile_path_prints_nothing_but_text(
    command: str, debug: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / f"a{FORGED}"
    place.mkdir()
    (place / f"b{FORGED}").write_text("no node's")
    more = {
        "tail": ["c"],
        "restore": [str(tmp_path / "to")],
        "backup": [str(tmp_path / "to")],
        "export": [str(tmp_path / "to")],
    }.get(command, [])
    main([*command.split(), str(place), *more, *debug])
    told = capsys.readouterr()
    for line in (told.out + told.err).splitlines():
        assert line.isprintable(), repr(line)
        assert not line.startswith("2026"), line


def test_wrong_use_is_told_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"ls{FORGED}"]) == 2
    assert main(["collection", "ls", "data", f"--{FORGED}"]) == 2
    told = capsys.readouterr().err
    assert all(line.isprintable() and not line.startswith("2026") for line in told.splitlines())
    assert "forged" in told


def test_rows_of_a_file_that_do_not_fit_are_shown_by_their_begin_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(tmp_path / "data")
    with sn.sync.open_node(data) as node:
        schema = pa.schema([pa.field("id", pa.int64()), pa.field("value", pa.int64())])
        node.create_collection("c", schema, primary_key="id")
    files = []
    for number, value in enumerate((LONG, FORGED + LONG, [LONG], {"a": LONG})):
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_text(json.dumps({"id": 1, "value": value}) + "\n")
        files.append(tmp_path / f"{number}.parquet")
        pq.write_table(pa.table({"id": [1], "value": [value]}), files[-1])
    files.append(tmp_path / "name.jsonl")
    files[-1].write_text(json.dumps({"id": 1, "value": 1, "n" + LONG + FORGED: 1}) + "\n")
    for file in files:
        assert main(["insert", data, "c", str(file), "--debug"]) in {1, 2}, file
        told = capsys.readouterr()
        assert SECRET not in told.out + told.err
        assert all(
            line.isprintable() and not line.startswith("2026") for line in told.err.splitlines()
        ), told.err


def test_an_event_is_one_line_and_its_traceback_is_indented(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = event_log("tests.texts")
    with caplog.at_level(logging.INFO):
        log.info("opened", path=f"a{FORGED}", names=[FORGED], error=Corrupt(FORGED))
        try:
            raise OSError(5, f"broken{FORGED}")
        except OSError:
            log.exception("failed", path=f"a{FORGED}")
    opened, failed = (record.getMessage() for record in caplog.records)
    assert opened.isprintable()
    first, *trace = failed.splitlines()
    assert first.startswith("event=failed path=a\\n2026")
    assert all(line.startswith("    ") and line.isprintable() for line in trace)
    assert any("OSError" in line for line in trace)
    assert not caplog.records[1].exc_info, "a handler would print it once more"


def test_shown_is_bounded_escaped_and_never_fails() -> None:
    for value in HOSTILE:
        text = shown(value)
        assert text.isprintable()
        assert len(text) <= 10 * SHOWN_MAX
        assert SECRET not in text
    assert shown("a\nb") == r"'a\nb'"
    assert brief("a\nb") == r"a\nb"
    assert escaped("tea — 5 €") == "tea — 5 €"
    assert escaped(os_path := "a\udcff") == r"a\udcff", os_path


def test_errors_carry_their_fields_as_they_are_and_their_text_escaped() -> None:
    error = StorageFailed(f"cannot make {FORGED} — choose {FORGED}")
    assert str(error).isprintable()
    assert error.happened.isprintable()
    assert "".join(traceback.format_exception_only(error)).rstrip("\n").isprintable()
    assert isinstance(InvalidArgument(""), StreamingNodeError)


def test_json_for_machines_carries_no_terminal_command_and_reads_back() -> None:
    value = {"name": FORGED, "\x9b": ["\x7f", "\u2028"]}
    assert json.loads(to_json(value)) == value
    assert not set(to_json(value)) & set("\x1b\x7f\x9b\n\u2028")


def test_a_table_of_hostile_cells_keeps_its_lines() -> None:
    out = io.StringIO()
    output = Output(stdout=out, stderr=out)
    output.table(["name"], [[FORGED], ["plain"]])
    output.line(FORGED)
    output.note(FORGED)
    assert len(out.getvalue().splitlines()) == 5
