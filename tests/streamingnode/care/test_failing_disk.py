"""A disk that fails at the n-th sync, for n = 1, 2, ...: backup and restore leave nothing half
done.
"""

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from streamingnode.care.backup import backup_directory, restore_directory
from streamingnode.care.verify import verify_directory
from tests.streamingnode.sample_node import Sample, copy_of, rows_of
from wal.errors import StreamingNodeError


def fail_at(monkeypatch: pytest.MonkeyPatch, at: int) -> Callable[[], bool]:
    """Let the n-th sync of a file or directory fail; return whether it came to that."""
    calls = itertools.count(1)
    reached = False
    real = os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal reached
        if next(calls) == at:
            reached = True
            raise OSError(5, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return lambda: reached


def run_until_it_passes(attempt: Callable[[int], bool]) -> int:
    """Call `attempt` with n = 1, 2, ... until it says that the n-th sync was not reached; return
    how many failed.
    """
    return next(n for n in itertools.count(1) if not attempt(n)) - 1


def test_a_backup_on_a_failing_disk_is_not_there(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copy_of(sample.closed, tmp_path / "node")

    def attempt(at: int) -> bool:
        target = tmp_path / f"backup-{at}"
        with monkeypatch.context() as patched:
            reached = fail_at(patched, at)
            try:
                backup_directory(path, target)
            except StreamingNodeError:
                assert reached()
        assert not target.with_name(f"{target.name}.unfinished").exists()
        if target.exists():  # the last sync, of the name, may fail when the name is there already
            assert not verify_directory(target).damages
        return reached()

    assert run_until_it_passes(attempt) > 20


def test_a_restore_on_a_failing_disk_is_not_there(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup_directory(copy_of(sample.closed, tmp_path / "node"), tmp_path / "backup")

    def attempt(at: int) -> bool:
        target = tmp_path / f"restored-{at}"
        with monkeypatch.context() as patched:
            reached = fail_at(patched, at)
            try:
                restore_directory(tmp_path / "backup", target)
            except StreamingNodeError:
                assert reached()
        assert not target.with_name(f"{target.name}.unfinished").exists()
        if target.exists():
            assert rows_of(target) == sample.rows
        return reached()

    assert run_until_it_passes(attempt) > 20
