"""Taking a node directory: own it, make what is missing, verify without changing anything, claim it, open it, take the term.

In: a directory. Out: an `OwnedDirectory` with its database open under a term above all earlier ones. The same steps from
verifying on bring a database back after a failed write. Blocks.

The claim is written before the database is opened for good, so that everything is found that an owner which no lock kept
out acknowledged before it was fenced (`wal.rocks.claim`). What is recovered is written into new files by RocksDB and synced,
because after a failed sync the pages of the old ones may look clean in memory without being on the disk.
"""

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from rocksdict import Rdict

from wal.errors import Corrupt
from wal.failpoint import failpoint
from wal.rocks.claim import Claim
from wal.rocks.directory import (
    check_place,
    classified,
    make_directory,
    open_database,
    prepare_database,
    verify_database,
)
from wal.rocks.floor import Floor, FloorFile, read_floor
from wal.rocks.keys import DURABILITY_KEY, TERM_KEY, encode_number
from wal.rocks.options import DATABASE_NAME, RocksOptions
from wal.rocks.ownership import DirectoryLock
from wal.rocks.recovery import Survey
from wal.rocks.space_watch import SpaceWatch
from wal.rocks.surroundings import Surroundings


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedDatabase:
    """A verified database, open for writing under `term`, with what was found in it."""

    database: Rdict
    found: Survey
    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedDirectory:
    """What an owner holds for as long as it owns the directory; `opened` is the database as it was found first."""

    directory: Path
    lock: DirectoryLock
    claim: Claim
    floor: FloorFile
    space: SpaceWatch
    opened: OpenedDatabase
    promised_tick: int

    def let_go(self) -> None:
        """Give the directory up; idempotent. The database is closed before."""
        self.claim.close()
        self.floor.close()
        self.lock.release()


def take_directory(directory: Path, options: RocksOptions, surroundings: Surroundings) -> OwnedDirectory:
    """Own a directory and open its database.

    Raises as `wal.rocks.store.open_rocks_store`; nothing is held then.
    """
    make_directory(directory)
    failpoint("recovery.directory_made")
    with classified(directory), ExitStack() as undo:
        check_place(directory)  # before anything is put there, the lock included
        lock = DirectoryLock(directory)
        undo.callback(lock.release)
        failpoint("recovery.directory_locked")
        space = SpaceWatch(directory, free_bytes_min=options.free_bytes_min, free_bytes=surroundings.free_bytes)
        space.make_room_to_start()
        floor = prepare_database(directory, options, surroundings.make_node_id)
        failpoint("recovery.database_prepared")
        found = verify_database(directory, options, floor)
        failpoint("recovery.verified")
        claim = Claim(directory)
        undo.callback(claim.close)
        term = _claim(claim, _term_after(found, floor))
        floor = _floor_of(directory)  # once more: what an owner that is fenced now had acknowledged until then
        floor_file = FloorFile(directory, floor)
        undo.callback(floor_file.close)
        opened = _open(directory, options, floor_file, floor, term)
        undo.callback(opened.database.close)
        space.look()
        undo.pop_all()
    return OwnedDirectory(
        directory=directory,
        lock=lock,
        claim=claim,
        floor=floor_file,
        space=space,
        opened=opened,
        promised_tick=floor.tick,
    )


def open_again(owned: OwnedDirectory, options: RocksOptions, *, term_is_spent: bool) -> OpenedDatabase:
    """Verify and open the database of an owned directory after it was closed, under the next term.

    The next term is the one claimed last, unless something was acknowledged in it: then `term_is_spent`. So a disk on which
    no term gets that far does not use them up. The floor in memory counts too: it knows everything that was acknowledged,
    even if the floor file does not any more. Raises as `take_directory`.
    """
    owned.space.make_room_to_start()
    floor = owned.floor.known
    _floor_of(owned.directory)
    found = verify_database(owned.directory, options, floor)
    failpoint("recovery.verified")
    term = _claim(owned.claim, _term_after(found, floor) if term_is_spent else owned.claim.term)
    opened = _open(owned.directory, options, owned.floor, floor, term)
    owned.space.look()
    return opened


def _term_after(found: Survey, floor: Floor) -> int:
    return 1 + max(found.term, floor.term)


def _claim(claim: Claim, term: int) -> int:
    claim.take(term)
    failpoint("recovery.claimed")
    return term


def _floor_of(directory: Path) -> Floor:
    floor = read_floor(directory)
    if floor is None:
        raise Corrupt(f"the floor file of {directory} is gone — restore the node directory from a backup")
    return floor


def _open(directory: Path, options: RocksOptions, floor_file: FloorFile, floor: Floor, term: int) -> OpenedDatabase:
    database, found = open_database(directory, options, floor)
    failpoint("recovery.database_opened")
    with classified(directory / DATABASE_NAME):
        try:
            _take_term(database, floor_file, found, term, options)
        except BaseException:
            with suppress(Exception):  # the first error is the one that counts; RocksDB repeats it here
                database.close()
            raise
    return OpenedDatabase(database=database, found=found, term=term)


def _take_term(database: Rdict, floor: FloorFile, found: Survey, term: int, options: RocksOptions) -> None:
    """Make the new term durable in both places before anything is done under it."""
    if found.term != term:
        database.put(DURABILITY_KEY, options.durability.encode())
        database.put(TERM_KEY, encode_number(term))
        failpoint("recovery.term_written")
    database.flush_wal(sync=True)
    failpoint("recovery.term_synced")
    # What a killed owner wrote without acknowledging is part of the log now, and readers may see it.
    floor.record(found.last_positions, term=term, meta=found.meta_version)
    failpoint("recovery.floor_recorded")
    floor.sync()
    failpoint("recovery.floor_synced")
