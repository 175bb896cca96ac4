"""Where a restart begins: the last cut, and the state of the shards as of its tick. No I/O.

One checkpoint per pchannel, under a key of the log store's own map, replaced after each cut. It is never ahead of what it
covers: the cut's manifest and every file it names are on disk before.
"""

import msgspec

from interceptors.shard.state import ShardState
from wal.errors import Corrupt, UnsupportedFormat
from wal.position import FIRST_POSITION
from wal.timetick import physical_ms

CHECKPOINT_FORMAT = 2

HISTORY_STEPS = 256
"""The history's grain is the minimum retention divided by this: 5.6 minutes for a day."""


class CutPosition(msgspec.Struct, frozen=True, array_like=True):
    """A cut, where a reader of what follows it resumes, and when it was made: by the clock, in Unix ms, at the latest."""

    tick: int
    position: int
    made_ms: int

    def age_ms(self, now_ms: int) -> int:
        """Return how long ago the cut was made, at least.

        Its tick tells that, unless it is ahead of the clock: because a clock was ahead once, or because this one is behind.
        Then `made_ms` does; when that is ahead as well, nothing is known but that the cut is there.
        """
        told_ms = physical_ms(self.tick)
        return max(0, now_ms - (told_ms if told_ms <= now_ms else self.made_ms))


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything at or below `tick` is in files, `shard_state` and `producers`; what follows is read from `position`.

    `position` is the last-confirmed position of the cut, so it may lie before entries at or below `tick`. Number 0 and
    position 0 mean: no cut yet, everything is in the log. `history` tells retention where the log stood at earlier cuts.
    """

    format: int = CHECKPOINT_FORMAT
    cut_number: int = 0
    tick: int = 0
    position: int = 0
    manifest_crc32c: int = 0
    history: tuple[CutPosition, ...] = ()
    shard_state: bytes | None = None
    producers: bytes | None = None

    @property
    def start_position(self) -> int:
        """Where a reader of what is not in files begins; a log that was truncated meanwhile refuses it."""
        return self.position or FIRST_POSITION

    def state(self) -> ShardState:
        """Return the state of the shards as of its tick."""
        return ShardState() if self.shard_state is None else ShardState.restore(self.shard_state)


class _Versioned(msgspec.Struct):
    format: int


NO_CHECKPOINT = Checkpoint()

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Checkpoint).decode


def checkpoint_key(pchannel: str) -> str:
    """Return the key a pchannel's checkpoint has in the log store's map."""
    return f"checkpoint/{pchannel}"


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """Return the stored form of a checkpoint."""
    return _encode(checkpoint)


def decode_checkpoint(content: bytes | None) -> Checkpoint:
    """Return a stored checkpoint; `NO_CHECKPOINT` when there is none.

    Raises `Corrupt` for other bytes and `UnsupportedFormat` for a newer release's.
    """
    if content is None:
        return NO_CHECKPOINT
    try:
        version = msgspec.msgpack.decode(content, type=_Versioned).format
        if version != CHECKPOINT_FORMAT:
            raise UnsupportedFormat(f"the checkpoint has format {version}, this release reads {CHECKPOINT_FORMAT}")
        return _decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"the checkpoint does not decode: {error}") from error


def extend_history(
    history: tuple[CutPosition, ...], step: CutPosition, *, now_ms: int, retention_ms: int
) -> tuple[CutPosition, ...]:
    """Return the history with a new cut: thinned to its grain, and without what no bound needs any more.

    Of the cuts older than the retention the newest stays: it is the bound. Of three neighbours the outer two are at least a
    grain apart, so at most twice `HISTORY_STEPS` and a few are kept, however often cuts are made.
    """
    grain_ms = retention_ms // HISTORY_STEPS
    # No cut was made after a later one, whatever the clock said then.
    kept = tuple(
        cut if cut.made_ms <= step.made_ms else CutPosition(cut.tick, cut.position, step.made_ms) for cut in history
    )
    if len(kept) > 1 and kept[-2].age_ms(now_ms) - step.age_ms(now_ms) < grain_ms:
        kept = kept[:-1]
    kept = (*kept, step)
    expired = [index for index, cut in enumerate(kept) if cut.age_ms(now_ms) >= retention_ms]
    return kept[expired[-1] :] if expired else kept
