"""The open scanners of one log: unique names, a bound, and one call that closes them with the log's WAL."""

from scanner.deliver_policy import DeliverPolicy
from scanner.errors import ReaderBusy
from scanner.scanner import ScanLimits, Scanner, ScanStatistics
from wal.errors import OnShutdown, Overloaded
from wal.live_tail import LiveTail
from wal.log import Log
from wal.message_type import MessageType

SCANNERS_MAX = 1024
"""Each scanner may hold two batches; a thousand of them is 2 GiB at worst and more readers than one node feeds well."""


class ScannerRegistry:
    """Opens and closes the scanners of one log; lives on the event loop."""

    def __init__(
        self, log: Log, tail: LiveTail | None, *, limits: ScanLimits | None = None, scanners_max: int = SCANNERS_MAX
    ) -> None:
        self._log = log
        self._tail = tail
        self._limits = limits or ScanLimits()
        self._scanners_max = scanners_max
        self._scanners: dict[str, Scanner] = {}
        self._made = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._open_scanners())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the open scanners."""
        return tuple(self._open_scanners())

    def statistics(self) -> tuple[ScanStatistics, ...]:
        """Return what each open scanner holds and has met, oldest first."""
        return tuple(scanner.statistics for scanner in self._open_scanners().values())

    def open(
        self,
        policy: DeliverPolicy,
        *,
        vchannels: frozenset[str] | None = None,
        types: frozenset[MessageType] | None = None,
        after_tick: int = 0,
        name: str | None = None,
        limits: ScanLimits | None = None,
    ) -> Scanner:
        """Return a new scanner; without a name it gets one.

        Raises `ReaderBusy` for a name in use, `Overloaded` at the bound, `OnShutdown` when closed, `InvalidArgument`
        as `Scanner` does.
        """
        self._check_room(name)
        self._made += 1
        scanner = Scanner(
            self._log,
            self._tail,
            policy,
            vchannels=vchannels,
            types=types,
            after_tick=after_tick,
            name=name or f"{self._log.name}/{self._made}",
            limits=limits or self._limits,
        )
        self._scanners[scanner.name] = scanner
        return scanner

    async def close(self) -> None:
        """Close every scanner and open no more; idempotent."""
        self._closed = True
        scanners, self._scanners = self._scanners, {}
        for scanner in scanners.values():
            await scanner.close()

    def _check_room(self, name: str | None) -> None:
        if self._closed:
            raise OnShutdown(f"log {self._log.name} is closing")
        scanners = self._open_scanners()
        if name in scanners:
            raise ReaderBusy(f"a scanner named {name!r} is open on {self._log.name} — close it, or use another name")
        if len(scanners) >= self._scanners_max:
            raise Overloaded(f"{len(scanners)} scanners are open on {self._log.name} — close one first")

    def _open_scanners(self) -> dict[str, Scanner]:
        self._scanners = {name: scanner for name, scanner in self._scanners.items() if not scanner.closed}
        return self._scanners
