"""`verify`, `backup`, `restore` and `export`: what they print, and how they end."""

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pyarrow.parquet as pq
import pytest

from streamingnode.cli.care import show_steps
from streamingnode.progress import Progress
from tests.streamingnode.sample_node import flip, largest, segment

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.streamingnode.cli.conftest import Place, Printed

    Run = Callable[..., Printed]

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def cut(data: Path, run: "Run") -> Path:
    """The node with its rows in a cut, and some after it."""
    assert run("flush", data).code == 0
    more = data.parent / "more.jsonl"
    more.write_text('{"id": 4, "item": "jam"}\n')
    assert run("insert", data, "orders", more).code == 0
    return data


def _findings(printed: "Printed") -> list[dict[str, str]]:
    return cast("list[dict[str, str]]", printed.document["findings"])


def test_a_sound_node_ends_with_zero_and_says_what_was_checked(cut: Path, run: "Run") -> None:
    printed = run("verify", cut)
    assert printed.code == 0
    assert "all is as it was written, 0 warnings" in printed.out
    assert "3 rows" in printed.out
    assert printed.err == "", "where nobody waits"
    document = run("verify", cut, "--json").document
    assert (document["verdict"], document["findings"]) == ("sound", [])


def test_warnings_end_with_one_and_damage_with_three(cut: Path, run: "Run") -> None:
    (cut / "notes.txt").write_text("mine")
    assert run("verify", cut).code == 1
    flip(segment(cut, 0), 200)
    printed = run("verify", cut)
    assert printed.code == 3
    lines = printed.out.splitlines()
    assert lines[0].startswith("warning: notes.txt: ")
    assert lines[2].startswith(f"damage: {segment(cut, 0).relative_to(cut)}: ")
    document = run("verify", cut, "--json")
    assert document.code == 3
    assert [finding["severity"] for finding in _findings(document)] == ["damage", "warning"]


def test_a_node_with_a_damaged_log_is_verified_by_the_program_itself(cut: Path) -> None:
    table = largest(cut, "log/*.sst")
    flip(table, table.stat().st_size // 4)
    program = [sys.executable, "-m", "streamingnode", "verify", str(cut)]
    ran = subprocess.run(
        program, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 3
    assert "damage: " in ran.stdout


def test_a_directory_that_is_no_node_is_wrong_use(tmp_path: Path, run: "Run") -> None:
    for command in ("verify", "backup"):
        extra = [tmp_path / "target"] if command == "backup" else []
        printed = run(command, tmp_path, *extra)
        assert printed.code == 2
        assert printed.err.startswith("INVALID_ARGUMENT: ")


def test_tables_and_backups_that_are_not_there_are_wrong_use(
    cut: Path, tmp_path: Path, run: "Run"
) -> None:
    tables = run("verify", cut, "--tables", tmp_path / "missing")
    assert (tables.code, "name the directory that `ingest --tables` made" in tables.err) == (
        2,
        True,
    )
    backup = run("restore", tmp_path / "missing", tmp_path / "target")
    assert (backup.code, "name a directory that `backup` made" in backup.err) == (2, True)


def test_backup_and_restore_go_round(cut: Path, tmp_path: Path, run: "Run") -> None:
    backup = tmp_path / "backup"
    restored = tmp_path / "restored"
    made = run("backup", cut, backup)
    assert made.code == 0
    assert "verified" in made.out
    assert run("verify", backup).code == 0
    assert run("restore", backup, restored, "--json").document["cut"] == 1
    assert run("tail", restored, "orders").out == run("tail", cut, "orders").out
    again = run("restore", backup, restored)
    assert (again.code, again.err.partition(":")[0]) == (1, "ALREADY_EXISTS")
    flip(largest(backup, "log/*.sst"), 100)
    damaged = run("restore", backup, tmp_path / "other")
    assert damaged.code == 3
    assert "CORRUPT: " in damaged.err
    assert not (tmp_path / "other").exists()


def test_restore_puts_back_one_file(cut: Path, tmp_path: Path, run: "Run") -> None:
    run("backup", cut, tmp_path / "backup")
    lost = segment(cut, 0)
    name = lost.relative_to(cut)
    lost.unlink()
    done = run("restore", tmp_path / "backup", cut, "--file", name)
    assert done.code == 0
    assert done.out.startswith(f"{name}: ")
    assert run("verify", cut).code == 0
    flip(tmp_path / "backup" / name, 200)
    refused = run("restore", tmp_path / "backup", cut, "--file", name)
    assert (refused.code, refused.err.partition(":")[0]) == (3, "CORRUPT")
    assert run("verify", cut).code == 0


def test_export_ends_with_zero_three_or_one(cut: Path, tmp_path: Path, run: "Run") -> None:
    sound = run("export", cut, tmp_path / "sound", "--json")
    assert (sound.code, sound.document["missing"]) == (0, [])
    assert sound.document["files"] == [
        {"collection": "orders", "path": str(tmp_path / "sound" / "orders.parquet"), "rows": 4}
    ]
    lost = segment(cut, 0)
    lost.unlink()
    refused = run("export", cut, tmp_path / "out")
    assert (refused.code, refused.err.partition(":")[0]) == (3, "CORRUPT")
    assert not (tmp_path / "out").exists()
    rest = run("export", cut, tmp_path / "out", "--salvage")
    assert rest.code == 1
    assert f"missing: {lost.relative_to(cut)} of collection orders, " in rest.out


def test_a_node_is_exported_wherever_it_is(place: "Place", tmp_path: Path, run: "Run") -> None:
    with place.open() as node:
        node.insert(place.orders, [{"id": 1, "item": "tea"}, {"id": 2, "item": "milk"}])
        node.delete(place.orders, [2])
    done = run("export", *place.arguments, tmp_path / "rows", "--json")
    assert (done.code, done.document["missing"]) == (0, [])
    assert pq.read_table(tmp_path / "rows" / f"{place.orders}.parquet").to_pylist() == [
        {"id": 1, "item": "tea"}
    ]
    if place.way != "closed":
        refused = run("export", *place.arguments, tmp_path / "more", "--salvage")
        assert (refused.code, "leave --salvage out" in refused.err) == (2, True)
        assert not (tmp_path / "more").exists()


def test_a_file_comes_back_while_a_service_has_the_node(
    service: tuple[Path, str, Path], tmp_path: Path, run: "Run"
) -> None:
    directory = service[0]
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": 1}\n')
    assert (
        run("insert", directory, "lost-and-found", rows, "--create", "--primary-key", "id").code
        == 0
    )
    assert run("backup", directory, tmp_path / "backup").code == 0
    files = {each: each.stat().st_mtime_ns for each in directory.glob("segments/*/*.parquet")}
    lost = max(files, key=files.__getitem__)
    lost.unlink()
    assert run("verify", directory).code == 3
    done = run("restore", tmp_path / "backup", directory, "--file", lost.relative_to(directory))
    assert done.code == 0, done.err
    assert run("verify", directory).code == 0


def test_a_backup_of_a_node_in_use_is_refused_with_the_way_to_make_one(
    cut: Path, tmp_path: Path, run: "Run"
) -> None:
    from wal.files import DirectoryLock

    lock = DirectoryLock(cut)
    try:
        for command in (
            ("backup", cut, tmp_path / "b"),
            ("verify", cut),
            ("export", cut, tmp_path / "b"),
        ):
            assert run(*command).code == 4
    finally:
        lock.release()
    assert not list(tmp_path.glob("b*"))


def test_verify_reads_no_faster_than_its_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("streamingnode.cli.care.time", SimpleNamespace(sleep=slept.append))
    on_step = show_steps(Progress(io.StringIO()), bytes_per_s=1 << 20)
    on_step("log", 1 << 20)
    on_step("cuts", 1 << 19)
    assert slept == [1, 0.5]


@pytest.mark.parametrize("text", ["0", "-1", "nan", "fast", "10MiB", ""])
def test_a_pace_that_is_none_is_refused(text: str, cut: Path, run: "Run") -> None:
    assert run("verify", cut, f"--pace={text}").code == 2


def test_verify_at_a_pace_finds_the_same(cut: Path, run: "Run") -> None:
    document = run("verify", cut, "--pace", "1000", "--json").document
    assert document == run("verify", cut, "--json").document
