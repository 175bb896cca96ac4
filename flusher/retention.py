"""What may be given up: log entries that nobody will read again, and cuts that every table has taken.

Bounds are pessimistic: whoever might still read something holds it. Removal may be interrupted anywhere: that cuts may be
gone is recorded before they go, and a manifest is set aside under another name before its files go. So a crash never leaves
a manifest without its files, but for those of dropped collections, and the one set aside tells which files are left over.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import takewhile

import anyio
from anyio import to_thread

from flusher.cuts import UNREADABLE, Lease, encode_first_kept, kept_cuts_key, read_leases
from flusher.directory import CUTS, CutLog, NodeDirectory, cut_numbers, file_paths, manifest_path
from flusher.manifest import DELETES, SEGMENTS, Checkpoint, CutManifest, CutPosition, decode_manifest, manifest_crc32c
from wal.errors import Corrupt, Truncated, UnsupportedFormat
from wal.failpoint import failpoint
from wal.log import Log, LogStore

SET_ASIDE_SUFFIX = ".removed"
"""Ends the name of a manifest whose files are going."""

CUTS_REMOVED_PER_ROUND_MAX = 1000
"""Keeps one round short after a long pause; the next round takes more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionOptions:
    """How long things are kept at least, and how often that is looked at; seconds.

    `min_age_short_s` is the least age of log, not of cuts, while the disk is short of space: what is in files then gives way
    to new appends.
    """

    min_age_s: float = 86_400.0
    min_age_short_s: float = 0.0
    interval_s: float = 60.0


# --- bounds -----------------------------------------------------------------------------------------------------------


def newest_old_cut(
    history: Sequence[CutPosition], *, now_ms: int, min_age_ms: int, found_tick: int, open_ms: int
) -> CutPosition | None:
    """Return the newest cut of an age; those before it are older, whatever their ticks say. None without one.

    Cuts up to `found_tick` were there when the node was opened, `open_ms` ago: whatever clocks say, they are no younger.
    """
    for cut in reversed(history):
        if cut.age_ms(now_ms) >= min_age_ms or (cut.tick <= found_tick and open_ms >= min_age_ms):
            return cut
    return None


def truncation_bound(checkpoint: Checkpoint, *, reader_floor: int | None, old: CutPosition | None) -> int:
    """Return the position before which nobody needs the log any more; 0 when nothing may go. `old` is old enough.

    Flusher and recovery start at the checkpoint.
    """
    if old is None:
        return 0
    bound = min(checkpoint.position, old.position)
    return bound if reader_floor is None else min(bound, reader_floor)


def may_remove_cut(manifest: CutManifest, *, leases: Sequence[Lease], live: frozenset[int], old_tick: int) -> bool:
    """Whether a cut that is not the newest may go; `live` are the ids of the collections that were not dropped.

    It goes when it is old enough, as those up to `old_tick` are, every table has taken it, and each live collection in it
    has a table.
    """
    if manifest.tick > old_tick or any(lease.cut < manifest.number for lease in leases):
        return False
    without_table = live - {lease.collection_id for lease in leases}
    return not any(entry.collection_id in without_table for entry in manifest.collections)


# --- removal ----------------------------------------------------------------------------------------------------------


def finish_removal(cuts: CutLog) -> list[str]:
    """Remove the files of a cut that was set aside when a crash came, and return their paths; blocks.

    Only of the cut that the earliest one kept follows: what else lies there under such a name is left alone.
    """
    removed: list[str] = []
    for path in cuts.directory.files(CUTS):
        if path.endswith(SET_ASIDE_SUFFIX):
            try:
                content = cuts.directory.read(path)
                manifest = decode_manifest(content, name=path)
                follower = cuts.read(manifest.number + 1).manifest
            except (Corrupt, Truncated, UnsupportedFormat):
                continue
            if path == manifest_path(manifest.number) + SET_ASIDE_SUFFIX and (
                follower.previous_crc32c == manifest_crc32c(content)
            ):
                removed += _remove_files(cuts.directory, manifest)
    return removed


def _remove_files(directory: NodeDirectory, manifest: CutManifest) -> list[str]:
    """Remove the files of a cut that is set aside, then its manifest."""
    paths = [*file_paths(manifest), manifest_path(manifest.number) + SET_ASIDE_SUFFIX]
    for path in paths:
        directory.remove(path)
        failpoint("flush.cut_file_removed")
    return paths


@dataclass(frozen=True, slots=True)
class _Dropped:
    """The cut that names the drop of a collection, and the files that cuts named for it."""

    cut: CutManifest
    paths: list[str]


class Retention:
    """Applies the bounds to one log and one node directory; lives on the event loop.

    `reader_floor` returns the lowest position a named reader of the log still needs, None without one.
    """

    def __init__(
        self,
        cuts: CutLog,
        store: LogStore,
        log: Log,
        *,
        options: RetentionOptions,
        now_ms: Callable[[], int],
        elapsed_ms: Callable[[], int],
        reader_floor: Callable[[], int | None],
    ) -> None:
        self.options = options
        self._cuts = cuts
        self._directory = cuts.directory
        self._store = store
        self._log = log
        self._now_ms = now_ms
        self._elapsed_ms = elapsed_ms
        self._found_tick, self._opened_ms = log.last_tick, elapsed_ms()
        self._reader_floor = reader_floor
        self._dropped: dict[int, _Dropped] = {}
        self._enforcing = anyio.Lock()
        self._holds = 0

    @asynccontextmanager
    async def hold_cuts(self) -> AsyncIterator[None]:
        """Remove no cut inside the block, for whoever copies them."""
        async with self._enforcing:  # a round under way ends first
            self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    async def enforce(self, checkpoint: Checkpoint, live: frozenset[int], *, short_of_space: bool = False) -> int:
        """Give up what the bounds allow, and return the tick at or below which no reader starts any more.

        Idempotent. Raises `OSError` and what the log raises; nothing that is needed is lost then.
        """
        async with self._enforcing:
            age_s, short_age_s = self.options.min_age_s, self.options.min_age_short_s
            old = self._newest_old(checkpoint, age_s)
            log_old = self._newest_old(checkpoint, min(age_s, short_age_s)) if short_of_space else old
            bound = truncation_bound(checkpoint, reader_floor=self._reader_floor(), old=log_old)
            if bound > self._log.first_position:
                failpoint("flush.truncating")
                await self._log.truncate(bound)
            if not self._holds:
                await self._give_up_cuts(checkpoint, live, old_tick=0 if old is None else old.tick)
            return max((cut.tick for cut in checkpoint.history if cut.position <= bound), default=0)

    def _newest_old(self, checkpoint: Checkpoint, min_age_s: float) -> CutPosition | None:
        return newest_old_cut(
            checkpoint.history,
            now_ms=self._now_ms(),
            min_age_ms=int(min_age_s * 1000),
            found_tick=self._found_tick,
            open_ms=self._elapsed_ms() - self._opened_ms,
        )

    async def _give_up_cuts(self, checkpoint: Checkpoint, live: frozenset[int], *, old_tick: int) -> None:
        removable = await to_thread.run_sync(self._look, checkpoint, live, old_tick)
        if removable:
            first_kept = removable[-1].number + 1
            await self._store.put_meta({kept_cuts_key(self._log.name): encode_first_kept(first_kept)})
            failpoint("flush.cut_given_up")
            await to_thread.run_sync(self._remove_cuts, removable)
            self._cuts.forget_below(first_kept)

    def _look(self, checkpoint: Checkpoint, live: frozenset[int], old_tick: int) -> list[CutManifest]:
        """Remove files of dropped collections, and return the earliest cuts that may go, as many as one round takes."""
        leases = read_leases(self._directory, node_id=self._store.node_id)
        self._remove_dropped(checkpoint, live, leases, old_tick)
        numbers = [number for number in cut_numbers(self._directory) if number < checkpoint.cut_number]
        manifests = (self._cuts.read(number).manifest for number in numbers[:CUTS_REMOVED_PER_ROUND_MAX])
        return list(
            takewhile(lambda manifest: may_remove_cut(manifest, leases=leases, live=live, old_tick=old_tick), manifests)
        )

    def _remove_cuts(self, manifests: Sequence[CutManifest]) -> None:
        finish_removal(self._cuts)  # of a round that the disk kept from its end
        for manifest in manifests:
            path = manifest_path(manifest.number)
            failpoint("flush.cut_removing")
            self._directory.rename(path, path + SET_ASIDE_SUFFIX)
            failpoint("flush.cut_unlinked")
            self._directory.sync_parents([path])
            failpoint("flush.cut_gone")
            _remove_files(self._directory, manifest)

    def _remove_dropped(
        self, checkpoint: Checkpoint, live: frozenset[int], leases: Sequence[Lease], old_tick: int
    ) -> None:
        """Remove files of dropped collections for which no table waits; their cuts may stay. Safe to interrupt."""
        leased = {lease.collection_id for lease in leases}
        if UNREADABLE in leased:
            return
        with_files = {number for top in (SEGMENTS, DELETES) for number in self._directory.numbered(top)}
        gone = with_files - live - leased
        known = {number: self._dropped.get(number) or self._find_drop(number, checkpoint.cut_number) for number in gone}
        self._dropped = {number: dropped for number, dropped in known.items() if dropped is not None}
        for dropped in self._dropped.values():
            if dropped.cut.tick <= old_tick:
                for path in dropped.paths:
                    self._directory.remove(path)

    def _find_drop(self, collection_id: int, newest: int) -> _Dropped | None:
        """Return what the cuts up to `newest` say of a collection; None while none of them says that it was dropped."""
        dropped: _Dropped | None = None
        for number in reversed([number for number in cut_numbers(self._directory) if number <= newest]):
            manifest = self._cuts.read(number).manifest
            entry = next((each for each in manifest.collections if each.collection_id == collection_id), None)
            if dropped is None and entry is not None and entry.dropped_tick:
                dropped = _Dropped(manifest, [])
            elif (entry is None) == (dropped is not None):  # it lives, or was not made yet
                break
            if dropped is not None:
                dropped.paths.extend(file.path for file in manifest.files if file.collection_id == collection_id)
        return dropped
