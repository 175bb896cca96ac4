"""What a log built anew takes from named readers: positions that they had not read and could have. Reads; blocks.

The rows there are in files, and still the readers were promised them in order, each once: nobody may take that silently.
"""

from collections.abc import Iterator, Mapping

from rocksdict import Rdict

from flusher.checkpoint import Checkpoint
from streamingnode.repair.log_salvage import LogSalvage
from streamingnode.verification.reader_check import ReaderBehind, decode_readers, readers_behind, still_live
from wal.rocks.layout import META_PREFIX


def taken_from_readers(
    log: LogSalvage, entries: Rdict, records: Mapping[bytes, bytes], *, checkpoint: Checkpoint, first_position: int
) -> Iterator[str]:
    """Yield what each reader gives up when the log, which begins at `first_position` now, begins where the salvage does.

    `records` are the small ones of the database. A reader that is behind the log already could not go on anyway.
    """
    for reader in _readers_behind(log, entries, records, checkpoint):
        if reader.position >= first_position:
            lost = f"positions {reader.position} to {log.first_position - 1}, which it cannot read any more"
            yield f"{reader}: {lost}; rows up to the newest cut, {checkpoint.cut_number}, are in files"


def _readers_behind(
    log: LogSalvage, entries: Rdict, records: Mapping[bytes, bytes], checkpoint: Checkpoint
) -> list[ReaderBehind]:
    state = {key[len(META_PREFIX) :].decode(): value for key, value in records.items() if key.startswith(META_PREFIX)}
    behind = readers_behind(
        decode_readers(state), pchannel=log.name, first_position=log.first_position, checkpoint=checkpoint
    )
    last = 0 if log.kept is None else log.kept.last
    return still_live(behind, entries, log.log_id, position=checkpoint.position, last=last)
