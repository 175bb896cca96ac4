"""The audit log: who connects, who is refused, and what admins do; bounded in rate and on the disk.

What clients say of themselves is quoted, so that it forges no field. Whoever reaches the port
causes lines, so each kind of them has a rate of its own: refusals leave no call of an admin out.
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
"""Of connections that were let in, and of calls of admins, each."""
REFUSALS_PER_S = 10
"""Of connections that carried something else, clients that were refused, and calls, each."""
FILE_BYTES_MAX = 16 << 20
"""Of one file; the next line begins a new one."""
FILES_MAX = 8
"""With the one that is written: the oldest goes."""


class _Second(msgspec.Struct):
    """One kind of lines since a moment."""

    began_s: float
    written: int = 0
    left_out: int = 0


class Audit:
    """What one server says. `clock` is monotonic, in seconds; for tests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[str, _Second] = {}
        """By kind, of which there are as many as methods below."""

    def connected(self, client: str, address: str) -> None:
        """Somebody is let in."""
        if self._has_room("client_connected", LINES_PER_S):
            _log.info("client_connected", client=shown(client), address=address)

    def refused(self, code: str, client: str, address: str) -> None:
        """A hello is refused, under the code of an error."""
        if self._has_room("client_refused", REFUSALS_PER_S):
            _log.warning("client_refused", code=code, client=shown(client), address=address)

    def broken(self, address: str, error: Exception) -> None:
        """A connection carried no part of the protocol, was silent, or its token expired."""
        if self._has_room("connection_refused", REFUSALS_PER_S):
            _log.warning("connection_refused", address=address, error=shown(str(error)))

    def admin_call(self, client: str, call: str, collection: str, outcome: str) -> None:
        """A call that needs the right `admin` has ended; who has not that right leaves out no
        other.
        """
        is_denied = outcome == AccessDenied.code
        kind = "denied admin_call" if is_denied else "admin_call"
        if self._has_room(kind, REFUSALS_PER_S if is_denied else LINES_PER_S):
            fields = {"client": shown(client), "call": call, "collection": shown(collection)}
            _log.info("admin_call", **fields, outcome=outcome)

    def tell_left_out(self) -> None:
        """Write how many lines were left out; to be called now and then, and at the end."""
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
    """A file that only its owner reads, and so are those that it is renamed to."""

    def _open(self) -> TextIOWrapper:
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
        os.close(os.open(self.baseFilename, flags, FILE_MODE))
        return super()._open()


def audit_to(file: Path) -> None:
    """Add what servers say to a file that only its owner reads. Raises `OSError`; blocks.

    Past `FILE_BYTES_MAX` it becomes `<file>.1`, that `<file>.2`, up to `FILES_MAX` in all.
    """
    handler = _AuditFile(file, maxBytes=FILE_BYTES_MAX, backupCount=FILES_MAX - 1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    audit = logging.getLogger(LOGGER)
    audit.setLevel(logging.INFO)
    audit.addHandler(handler)
