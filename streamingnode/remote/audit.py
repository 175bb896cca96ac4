"""The audit log: connections, refusals and calls of admins; bounded in rate and in size on disk.

Text from clients is quoted, so that it cannot forge fields. Anyone who reaches the port causes
lines, so each kind of line has its own rate limit: many refusals cannot suppress the calls of
admins.
"""

import logging
import logging.handlers
import os
import time
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path

import msgspec

from streamingnode.errors import AccessDenied
from wal.errors import shown
from wal.files import FILE_MODE
from wal.runtime import event_log

LOGGER = "streamingnode.audit"
_log = event_log(LOGGER)

LINES_PER_S = 100
"""Lines per second for accepted connections, and as many for calls of admins."""
REFUSALS_PER_S = 10
"""Lines per second for broken connections, and as many each for refused clients and denied calls.
"""
FILE_BYTES_MAX = 16 << 20
"""The size of one file; the next line begins a new file."""
FILES_MAX = 8
"""The number of files, including the current one; the oldest is deleted."""


class _Second(msgspec.Struct):
    """Counts of one kind of line since `began_s`."""

    began_s: float
    written: int = 0
    left_out: int = 0


class Audit:
    """Writes the audit lines of one server. `clock` is monotonic, in seconds; tests replace it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[str, _Second] = {}
        """Counts by kind; the methods below define the kinds."""

    def connected(self, client: str, address: str) -> None:
        """Log an accepted client."""
        if self._has_room("client_connected", LINES_PER_S):
            _log.info("client_connected", client=shown(client), address=address)

    def refused(self, code: str, client: str, address: str) -> None:
        """Log a refused hello with the code of its error."""
        if self._has_room("client_refused", REFUSALS_PER_S):
            _log.warning("client_refused", code=code, client=shown(client), address=address)

    def broken(self, address: str, error: Exception) -> None:
        """Log a connection that broke the protocol, was silent, or whose token expired."""
        if self._has_room("connection_refused", REFUSALS_PER_S):
            _log.warning("connection_refused", address=address, error=shown(str(error)))

    def admin_call(self, client: str, call: str, collection: str, outcome: str) -> None:
        """Log the end of a call that needs the right `admin`. Denied calls have their own rate
        limit, so they cannot suppress other lines.
        """
        is_denied = outcome == AccessDenied.code
        kind = "denied admin_call" if is_denied else "admin_call"
        if self._has_room(kind, REFUSALS_PER_S if is_denied else LINES_PER_S):
            fields = {"client": shown(client), "call": call, "collection": shown(collection)}
            _log.info("admin_call", **fields, outcome=outcome)

    def tell_left_out(self) -> None:
        """Log how many lines were left out; call it regularly and at the end."""
        for kind, second in self._seconds.items():
            self._sum_up(kind, second)

    def _has_room(self, kind: str, lines_per_s: int) -> bool:
        now_s = self._clock()
        second = self._seconds.get(kind)
        if second is None or now_s - second.began_s >= 1:
            if second is not None:
                self._sum_up(kind, second)
            second = self._seconds[kind] = _Second(now_s)
        if second.written >= lines_per_s:
            second.left_out += 1
            return False
        second.written += 1
        return True

    def _sum_up(self, kind: str, second: _Second) -> None:
        if second.left_out:
            lasted_s = round(self._clock() - second.began_s, 1)
            _log.warning("audit_left_out", lines=kind, count=second.left_out, within_s=lasted_s)
            second.left_out = 0


class _AuditFile(logging.handlers.RotatingFileHandler):
    """A file that only its owner can read, like the files it is rotated to."""

    def _open(self) -> TextIOWrapper:
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        os.close(os.open(self.baseFilename, flags, FILE_MODE))
        return super()._open()


def audit_to(file: Path) -> None:
    """Append the audit lines of servers to a file that only its owner can read. Raises `OSError`;
    blocks.

    A file over `FILE_BYTES_MAX` is renamed to `<file>.1`, an older one to `<file>.2`; `FILES_MAX`
    files are kept in all.
    """
    handler = _AuditFile(file, maxBytes=FILE_BYTES_MAX, backupCount=FILES_MAX - 1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    audit = logging.getLogger(LOGGER)
    audit.setLevel(logging.INFO)
    audit.addHandler(handler)
