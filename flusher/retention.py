"""Removes log entries that nobody will read again, and cuts that every table has taken.

Bounds are pessimistic: a possible reader is enough to keep data. Removal can be interrupted
anywhere. The lowest kept cut number is recorded before cuts go, and a manifest is renamed before
its files go. So a crash never leaves a manifest without its files, except for files of dropped
collections, and the renamed manifest names the files that are left over.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from itertools import takewhile

import msgspec

from flusher.cuts import UNREADABLE, Lease, kept_cuts_key, read_leases
from flusher.directory import CUTS, CutLog, NodeDirectory, cut_numbers, file_paths, manifest_path
from flusher.manifest import (
    DATA,
    Checkpoint,
    CutManifest,
    CutPosition,
    decode_manifest,
    manifest_crc32c,
    named_for,
)
from flusher.run import FlushContext
from interceptors.shard.catalog import CollectionInfo
from interceptors.shard.state import ShardState
from wal.errors import Corrupt, Truncated, UnsupportedFormat
from wal.failpoint import failpoint
from wal.runtime import in_thread

SET_ASIDE_SUFFIX = ".removed"
"""The suffix of a manifest whose files are being removed."""

CUTS_REMOVED_PER_ROUND_MAX = 1000
"""Bounds the length of one round after a long pause; the next round removes more."""


def may_remove_cut(
    manifest: CutManifest,
    *,
    leases: Sequence[Lease],
    live: AbstractSet[int],
    old_tick: int,
    taken_tick: int = 0,
) -> bool:
    """Return whether a cut other than the newest can be removed; `live` are the ids of the
    collections that were not dropped.

    Every table must have taken it. Up to `old_tick`, each live collection in it must have a table.
    Above that, up to `taken_tick`, each collection in it must have one: a collection that was
    dropped lately can still be read. Above both, a cut is too young.
    """
    if manifest.tick > max(old_tick, taken_tick) or any(
        lease.cut < manifest.number for lease in leases
    ):
        return False
    with_table = {lease.collection_id for lease in leases}
    named = {entry.collection_id for entry in manifest.collections}
    return named <= with_table if manifest.tick > old_tick else named.isdisjoint(live - with_table)


def finish_removal(cuts: CutLog) -> None:
    """Remove the files of a cut whose removal was interrupted by a crash. Blocks.

    Acts only on the cut right before the earliest kept one; other files with such a name stay.
    """
    for path in cuts.directory.files(CUTS):
        if path.endswith(SET_ASIDE_SUFFIX):
            try:
                content = cuts.directory.read(path)
                manifest = decode_manifest(content, name=path)
                follower = cuts.read(manifest.number + 1).manifest
            except (Corrupt, Truncated, UnsupportedFormat):
                continue
            is_followed = follower.previous_crc32c == manifest_crc32c(content)
            if is_followed and path == manifest_path(manifest.number) + SET_ASIDE_SUFFIX:
                _remove_files(cuts.directory, manifest)


def _remove_files(directory: NodeDirectory, manifest: CutManifest) -> None:
    """Remove the files of a renamed manifest, then the manifest."""
    for path in (*file_paths(manifest), manifest_path(manifest.number) + SET_ASIDE_SUFFIX):
        directory.remove(path)
        failpoint("flush.cut_file_removed")


class Retention:
    """Applies the bounds to one log and one node directory; lives on the event loop."""

    def __init__(self, context: FlushContext, cuts: CutLog) -> None:
        self._cuts = cuts
        self._directory = cuts.directory
        self._context = context
        self._found_tick = context.log.last_tick
        self._opened_ms = context.elapsed_ms()
        self._enforcing = asyncio.Lock()
        self._holds = 0

    @asynccontextmanager
    async def hold_cuts(self) -> AsyncIterator[None]:
        """Keep all cuts inside the block, for callers that copy them."""
        async with self._enforcing:  # waits for a round under way
            self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    async def enforce(
        self, checkpoint: Checkpoint, state: ShardState, *, short_of_space: bool = False
    ) -> int:
        """Remove what the bounds allow, and return the tick at or below which no reader starts any
        more.

        With `short_of_space` the log is kept only for `min_age_short_s`. Idempotent. Raises
        `OSError` and the errors of the log; needed data stays in each case.
        """
        async with self._enforcing:
            log = self._context.log
            options = self._context.options.retention
            log_age_s = (
                min(options.min_age_s, options.min_age_short_s)
                if short_of_space
                else options.min_age_s
            )
            old = self.newest_old(checkpoint.history, options.min_age_s)
            bound = self.bound(checkpoint, self.newest_old(checkpoint.history, log_age_s))
            if bound > log.first_position:
                failpoint("flush.truncating")
                # `truncate` evaluates the reader floor again: a reader may open while it waits for
                # the entry at the bound.
                await log.truncate(bound, needed=self._context.reader_floor)
            taken = self.newest_old(
                checkpoint.history, min(options.min_age_s, options.taken_cuts_s)
            )
            if taken is None or self._holds:
                return 0
            collections = state.catalog.collections(dropped=True)
            old_tick = 0 if old is None else old.tick
            removable, kept = await in_thread(
                self._look, checkpoint, collections, old_tick, taken.tick
            )
            await self._remove_earliest(removable)
            if old is None:
                return 0
            below = max(
                (cut.tick for cut in checkpoint.history if cut.position <= bound), default=0
            )
            return min(old.tick, below, *kept)

    def newest_old(self, history: Sequence[CutPosition], min_age_s: float) -> CutPosition | None:
        """Return the newest cut of at least this age, None without one. Cuts before it count as
        older, whatever their ticks.
        """
        now_ms = self._context.now_ms()
        min_age_ms = int(min_age_s * 1000)
        # Cuts from before the opening are at least as old as the opening, whatever clocks say.
        is_open_long = self._context.elapsed_ms() - self._opened_ms >= min_age_ms
        for cut in reversed(history):
            if cut.age_ms(now_ms) >= min_age_ms or (cut.tick <= self._found_tick and is_open_long):
                return cut
        return None

    def bound(self, checkpoint: Checkpoint, old: CutPosition | None) -> int:
        """Return the position before which the log is no longer needed; 0 when nothing can go.

        `old` is the newest cut that is old enough, None without one.
        """
        if old is None:
            return 0
        # flusher and recovery start at the checkpoint
        bound = min(checkpoint.position, old.position)
        reader_floor = self._context.reader_floor()
        return bound if reader_floor is None else min(bound, reader_floor)

    def _look(
        self,
        checkpoint: Checkpoint,
        collections: Sequence[CollectionInfo],
        old_tick: int,
        taken_tick: int,
    ) -> tuple[list[CutManifest], list[int]]:
        """Remove files of dropped collections. Return the removable cuts, and the ticks of drops
        that have to be remembered for leased tables.
        """
        leases = read_leases(self._directory, node_id=self._context.store.node_id)
        leased = {lease.collection_id for lease in leases}
        kept: list[int] = []
        for info in collections:
            if 0 < info.dropped_tick <= old_tick:
                if leased.isdisjoint({info.id, UNREADABLE}):
                    self._remove_dropped(info.id)
                else:
                    kept.append(info.dropped_tick)
        live = {info.id for info in collections if not info.dropped_tick}
        numbers = [
            number for number in cut_numbers(self._directory) if number < checkpoint.cut_number
        ]
        manifests = (
            self._cuts.read(number).manifest for number in numbers[:CUTS_REMOVED_PER_ROUND_MAX]
        )
        bounds = {"old_tick": old_tick, "taken_tick": taken_tick}
        may_go = takewhile(
            lambda each: may_remove_cut(each, leases=leases, live=live, **bounds), manifests
        )
        return list(may_go), kept

    def _remove_dropped(self, collection_id: int) -> None:
        """Remove the files of a dropped collection; their cuts may stay. Can be interrupted: the
        catalog keeps the drop.
        """
        for path in [
            path for top in DATA for path in self._directory.files(f"{top}/{collection_id}")
        ]:
            if named_for(path) is not None:
                self._directory.remove(path)

    async def _remove_earliest(self, earliest: Sequence[CutManifest]) -> None:
        if earliest:
            key = kept_cuts_key(self._context.log.name)
            first_kept = earliest[-1].number + 1
            await self._context.store.state.put({key: msgspec.msgpack.encode(first_kept)})
            failpoint("flush.cut_given_up")
            await in_thread(self._remove_cuts, earliest)
            self._cuts.forget_below(first_kept)

    def _remove_cuts(self, manifests: Sequence[CutManifest]) -> None:
        finish_removal(self._cuts)  # of a round that a disk error interrupted
        for manifest in manifests:
            path = manifest_path(manifest.number)
            failpoint("flush.cut_removing")
            self._directory.rename(path, path + SET_ASIDE_SUFFIX)
            failpoint("flush.cut_unlinked")
            self._directory.sync_parents([path])
            failpoint("flush.cut_gone")
            _remove_files(self._directory, manifest)
