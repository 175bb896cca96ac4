"""One pchannel for as long as its node is open: it takes appends, gives out readers, and comes back after a failed write.

In: an open store and the node's tick allocator. Out: a `Channel` whose parts change with each term while it stays the
same object. A write with an open outcome ends the term: its callers get `Indeterminate`, all others wait, the store is
reopened and verified, and the next term is rebuilt from the log; `streamingnode.log_state` has the states. Log, live
tail and scanners stay: a scanner that tailed finds the tail restarted, returns to the log at its own position, and
misses and repeats nothing.
"""

import asyncio
import time
from collections.abc import Mapping

import anyio

from interceptors.idempotency import OpenedProducer, Producers
from interceptors.shard.catalog import Catalog
from interceptors.shard.interceptor import ShardManager
from scanner.scanner import ScannerRegistry
from streamingnode.channel_term import ChannelOptions, ChannelParts, ChannelTerm, open_term
from streamingnode.errors import LogReopening
from streamingnode.log_state import TRANSITIONS, LogEvent, LogState, LogStatus, is_final, is_obstacle
from streamingnode.supervisor import Supervisor
from wal.errors import Indeterminate, OnShutdown, StorageFull, StreamingNodeError
from wal.event_log import event_log
from wal.failpoint import failpoint
from wal.headers import CutHeader, MessageType
from wal.live_tail import LiveTail
from wal.log import AppendGroup, AppendObserver, AppendResult, LogStore
from wal.message import MutableMessage
from wal.position import Place
from wal.queue import PendingBytes
from wal.timetick import TickAllocator

_log = event_log(__name__)


class Channel:
    """An open pchannel; `keep` is for the node to run. Lives on the event loop."""

    def __init__(self, parts: ChannelParts, term: ChannelTerm) -> None:
        self.store, self.log, self.tail, self.scanners = parts.store, parts.log, parts.tail, parts.scanners
        self.ticks, self.pending = parts.ticks, parts.pending
        self.producers: Producers = parts.producers
        self.checkpoint = term.checkpoint
        self.state = LogState.OPEN
        self._parts, self._options = parts, parts.options
        self._term = term
        self._back: asyncio.Future[None] | None = None
        """What everybody waits for while the log takes no appends; it fails when the log will not come back."""
        self._final_error: Exception | None = None
        self._takes_appends = True
        self._cutting = asyncio.Lock()
        self._scope = anyio.CancelScope()
        self._kept: asyncio.Future[None] | None = None
        self._reopened = self._attempts = 0
        self._last_error = ""
        self._full: StorageFull | None = None
        """Why the log is not back: then nobody waits for it, because waiting does not free space."""

    @property
    def term(self) -> ChannelTerm:
        """The present term or the last one."""
        return self._term

    @property
    def shards(self) -> ShardManager:
        """The shards as of the last group in the log's queue, in the present term or the last one."""
        return self._term.shards

    @property
    def catalog(self) -> Catalog:
        """The collections as of the last group in the log's queue."""
        return self._term.shards.catalog

    @property
    def status(self) -> LogStatus:
        """Where the log stands."""
        return LogStatus(
            pchannel=self.log.name,
            state=self.state.value,
            store=self.store.condition,
            term=self._term.wal.term,
            reopened=self._reopened,
            attempts=self._attempts,
            last_error=self._last_error,
        )

    # --- what callers do --------------------------------------------------------------------------------------------------

    async def append(self, group: AppendGroup) -> AppendResult:
        """Append a group through the chain; see `Wal.append`.

        While the log is being reopened, and when that begins before the group has its place in the log, the append waits for
        the next term. Raises `LogReopening` when that takes longer than `reopen.wait_s`; nothing was done then.
        """
        while True:
            term = self._term if self._back is None else await self._next_term()
            try:
                return await term.wal.append(group)
            except StreamingNodeError:
                if group.begun or not self._is_over(term):
                    raise

    async def consistent_tick(self) -> int:
        """Return a tick that no append acknowledged before the call is above; readers reach it without new writes."""
        while True:
            term = self._term if self._back is None else await self._next_term()
            try:
                return await term.ticks.sync()
            except StreamingNodeError as error:
                if not self._is_over(term):
                    self._refuse_if_closing(error)
                    raise

    async def request_cut(self) -> int:
        """Cut if there is something to cut, and return the number of the cut that covers everything before the call.

        That is 0 when there has never been anything to cut. Requests that come together share one cut. A cut whose write
        fails is looked for when the log is back, and asked for again if it is not there. Raises as an append does.
        """
        await self.live_term()  # outside the lock: inside it, each would wait its whole bound after those before it
        async with self._cutting:
            while True:
                term = self._term if self._back is None else await self._next_term()
                cut = AppendGroup([MutableMessage(MessageType.CUT, CutHeader())])
                try:
                    return await term.cut(cut)
                except StreamingNodeError as error:
                    if not self._is_over(term):
                        if not cut.begun:
                            self._refuse_if_closing(error)
                        raise

    async def put_meta(self, changes: Mapping[str, bytes | None]) -> None:
        """Set keys of the store's map as `LogStore.put_meta` does, again if the log was reopened meanwhile.

        Raises `Indeterminate` when a first try may have set them and no later one could.
        """
        doubt: Indeterminate | None = None
        while True:
            try:
                term = await self.live_term()
            except StreamingNodeError as error:
                if doubt is None:
                    raise
                raise doubt from error
            try:
                return await self.store.put_meta(changes)
            except StreamingNodeError as error:
                if not self._is_over(term):
                    raise
                doubt = error if isinstance(error, Indeterminate) else doubt

    async def scan_meta(self, prefix: str) -> dict[str, bytes]:
        """Return keys of the store's map; see `LogStore.scan_meta`."""
        return await self.store.scan_meta(prefix)

    # --- producers --------------------------------------------------------------------------------------------------------

    async def open_producer(self, name: str) -> OpenedProducer:
        """Open a named producer; see `Producers.open`. What a failed write leaves open is known when this returns."""
        while True:
            term = await self.live_term()
            try:
                opened = await self.producers.open(name)
            except StreamingNodeError:
                if not self._is_over(term):
                    raise
            else:
                if not self._is_over(term):
                    return opened

    async def put_producer_note(self, name: str, epoch: int, note: bytes) -> None:
        """Note something with a named producer; see `Producers.put_note`."""
        while True:
            term = await self.live_term()
            try:
                return await self.producers.put_note(name, epoch, note)
            except StreamingNodeError:
                if not self._is_over(term):
                    raise

    def place(self, producer_id: int, epoch: int, sequence: int) -> Place:
        """Return the place of a named producer's write; see `Producers.place`."""
        return self.producers.place(producer_id, epoch, sequence)

    async def delete_producer(self, name: str) -> bool:
        """Forget a named producer; see `Producers.delete`."""
        while True:
            term = await self.live_term()
            try:
                return await self.producers.delete(name)
            except StreamingNodeError:
                if not self._is_over(term):
                    raise

    def last_sequence(self, producer_id: int) -> int:
        """Return the highest sequence of a producer that is in the log, in the present term or the last one."""
        return self.producers.last_sequence(producer_id)

    async def live_term(self) -> ChannelTerm:
        """Return the present term, the next one while there is none. Raises `LogReopening` when that takes too long."""
        return self._term if self._back is None else await self._next_term()

    # --- the end ----------------------------------------------------------------------------------------------------------

    def stop_waiting(self) -> None:
        """Send everybody away who waits for the log to come back, with `OnShutdown`; the node is closing."""
        self._give_up(OnShutdown(f"the node closed while a call waited for log {self.log.name} — open it again"))

    async def stop_appends(self) -> None:
        """Refuse new appends and those that wait for anything but the disk, with `OnShutdown`; return when none is left.

        For good: a term that is being opened meanwhile takes none.
        """
        self._takes_appends = False
        self.stop_waiting()
        await self._term.wal.close()

    async def close(self) -> None:
        """Drain appends, then end the readers; the log stays the store's. Idempotent."""
        self._apply(LogEvent.CLOSE)
        self.stop_waiting()
        self._scope.cancel()
        if self._kept is not None:
            await asyncio.wait((self._kept,))
        await self._term.end()
        await self.scanners.close()
        self.tail.close()

    # --- the term and the next --------------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Run the workers of each term, and open the next one when a write failed, until `close`.

        Raises what makes that impossible: damage, another owner, or a bug of a worker.
        """
        self._kept = asyncio.get_running_loop().create_future()
        try:
            with self._scope:
                while True:
                    await self._work()
                    await self._change_term()
        except Exception as error:
            self._apply(LogEvent.DAMAGE)
            self._give_up(error)
            raise
        finally:
            self._kept.set_result(None)

    async def _work(self) -> None:
        """Run the workers until the store fails; raises what a worker raises, as it is."""
        term = self._term
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def watch() -> None:
            await self.store.wait_failed()
            if not over.done():
                over.set_result(None)

        def failed(error: BaseException) -> None:
            if not over.done():
                over.set_exception(error)

        workers = Supervisor(failed)
        try:
            workers.spawn(watch())
            for worker in term.workers:
                workers.spawn(worker.run(term.wal.append))
            await over
        finally:
            with anyio.CancelScope(shield=True):
                await workers.stop()

    async def _change_term(self) -> None:
        started = time.monotonic()
        self._lose()
        _log.warning("log_lost", pchannel=self.log.name, term=self._term.wal.term, store=self.store.condition)
        failpoint("recovery.write_failed")
        await self._term.end()
        failpoint("recovery.term_ended")
        self._apply(LogEvent.ENDED)
        term = await self._open_next_term()
        term.shards.skip_ids_below(self._term.shards.next_id)  # those on their way in an append that waits
        self._term = term
        if not self._takes_appends:
            await term.wal.close()
        self._reopened, self._attempts, self._full = self._reopened + 1, 0, None
        self._apply(LogEvent.RECOVERED)
        back, self._back = self._back, None
        if back is not None and not back.done():
            back.set_result(None)
        seconds = round(time.monotonic() - started, 3)
        _log.warning("log_reopened", pchannel=self.log.name, term=term.wal.term, seconds=seconds)

    async def _open_next_term(self) -> ChannelTerm:
        pause_s, obstacles_seen = self._options.reopen.first_pause_s, 0
        while True:
            try:
                await self.store.reopen()
                self._apply(LogEvent.VERIFIED)
                failpoint("recovery.reopened")
                return await open_term(self._parts)
            except (StreamingNodeError, OSError) as error:
                obstacles_seen = obstacles_seen + 1 if is_obstacle(error) else 0
                if is_final(error, obstacles_seen=obstacles_seen):
                    raise
                self._note(error, pause_s)
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._options.reopen.longest_pause_s)
            self._apply(LogEvent.RETRY)

    def _note(self, error: Exception, pause_s: float) -> None:
        self._apply(LogEvent.FAULT)
        self._attempts += 1
        self._last_error, self._full = _text(error), error if isinstance(error, StorageFull) else None
        _log.warning(
            "log_not_reopened",
            pchannel=self.log.name,
            attempts=self._attempts,
            pause_s=pause_s,
            error=self._last_error,
        )

    async def _next_term(self) -> ChannelTerm:
        """Wait, within the bound, until the log takes appends again."""
        while self._back is not None:
            if self._full is not None and not self._back.done():
                raise self._full.with_traceback(None)
            back, wait_s = self._back, self._options.reopen.wait_s
            done, _ = await asyncio.wait((back,), timeout=wait_s)
            if not done:
                raise LogReopening(
                    f"log {self.log.name} is {self.state.value} since a write failed, and was not back within {wait_s:g} s "
                    "— try again; nothing was done"
                )
            back.result()
        return self._term

    def _is_over(self, term: ChannelTerm) -> bool:
        """Whether a call that failed in `term` may hope for the next one."""
        if term is self._term and not self.store.taking_writes and self.state is LogState.OPEN:
            self._lose()  # at once, before `keep` has noticed: nobody may try again and again without a pause
        return term is not self._term or self._back is not None

    def _refuse_if_closing(self, error: StreamingNodeError) -> None:
        """Say why no term confirms the tick that a call waits for; it wrote nothing, so no outcome is open."""
        if isinstance(error, Indeterminate) and self._final_error is not None:
            raise self._final_error from error

    def _lose(self) -> None:
        if self.state is LogState.OPEN:
            self._apply(LogEvent.LOST)
            self._back = asyncio.get_running_loop().create_future()
            if self._final_error is not None:  # a write that fails while the node closes keeps nobody
                self._give_up(self._final_error)

    def _give_up(self, error: Exception) -> None:
        self._final_error = error
        back = self._back
        if back is not None and not back.done():
            back.set_exception(error)
            back.exception()  # counts as heard: there may be nobody waiting

    def _apply(self, event: LogEvent) -> None:
        if self.state is not LogState.CLOSED:  # whatever is still under way then ends by itself
            self.state = TRANSITIONS[self.state, event]


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


async def open_channel(
    store: LogStore,
    pchannel: str,
    *,
    ticks: TickAllocator,
    options: ChannelOptions,
    pending: PendingBytes,
    observer: AppendObserver | None = None,
) -> Channel:
    """Open a pchannel of `store`. Raises what recovery and the log raise; nothing is left open then."""
    log = await store.open_log(pchannel)
    tail = LiveTail(capacity_bytes=options.tail_capacity_bytes)
    producers = Producers(store, pchannel, options.producers)
    await producers.load()
    parts = ChannelParts(
        store=store,
        log=log,
        tail=tail,
        scanners=ScannerRegistry(log, tail),
        producers=producers,
        ticks=ticks,
        options=options,
        pending=pending,
        observer=observer,
    )
    return Channel(parts, await open_term(parts))
