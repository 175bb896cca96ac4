"""A disk that fails when a test says so: the writes and syncs of every log store opened after it
was made.
"""

import threading
from enum import Enum

import pytest
from rocksdict import WriteBatch

from wal.rocks.writer import Writer

GATE_S_MAX = 60


class Fault(Enum):
    """What is left of a batch whose call fails."""

    WRITE_LOST = "a write that leaves nothing"
    WRITE_DONE = "a write that happened, and was reported as failed"
    SYNC_LOST = "a sync that did not happen"
    SYNC_DONE = "a sync that happened, and was reported as failed"

    @property
    def call(self) -> str:
        """The engine's method that fails."""
        return "write" if self in (Fault.WRITE_LOST, Fault.WRITE_DONE) else "sync"


class FailingDisk:
    """`fail_at(n)` makes the n-th call from now on fail, and `times` in all; no call ends while the
    gate is shut.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fault: Fault = Fault.SYNC_LOST) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.failed = 0
        self.waiting = 0
        """Calls that are at the gate."""
        self._fault = fault
        self._good = 1 << 30
        self._bad = 0
        write = Writer.write_batch
        sync = Writer.sync_log

        def failing_write(writer: Writer, batch: WriteBatch) -> None:
            fails = fault.call == "write" and self._fails()
            if not fails or fault is Fault.WRITE_DONE:
                write(writer, batch)
            self._report(fails=fails)

        def failing_sync(writer: Writer) -> None:
            fails = fault.call == "sync" and self._fails()
            if not fails or fault is Fault.SYNC_DONE:
                sync(writer)
            self._report(fails=fails)

        monkeypatch.setattr(Writer, "write_batch", failing_write)
        monkeypatch.setattr(Writer, "sync_log", failing_sync)

    def fail_at(self, number: int, *, times: int = 1) -> None:
        """Let `number - 1` calls work, then `times` fail."""
        self._good = number - 1
        self._bad = times

    def heal(self) -> None:
        """Let every call work."""
        self._good = 1 << 30
        self._bad = 0

    @property
    def reached(self) -> bool:
        """Whether a call has failed."""
        return self.failed > 0

    def _fails(self) -> bool:
        self.waiting += 1
        self.gate.wait(GATE_S_MAX)
        self.waiting -= 1
        if self._good:
            self._good -= 1
            return False
        if not self._bad:
            return False
        self._bad -= 1
        self.failed += 1
        return True

    def _report(self, *, fails: bool) -> None:
        if fails:
            raise OSError(5, f"Input/output error: {self._fault.value}")
