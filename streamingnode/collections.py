"""Collections as callers see them, the definitions of new ones, and the checks of names."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from interceptors.shard.catalog import PARTITIONS_MAX, CollectionInfo
from streamingnode.schema import check_schema, decode_schema
from wal.errors import InvalidArgument, shown

SHARDS_MAX = 256
"""The most shards of one collection; each adds a message to every insert, and a file to every
cut.
"""
READ_COLLECTIONS_MAX = 1_024
"""The most collections of one reader; the stored name of a named reader lists them."""
NAME_CHARACTERS_MAX = 128
_NAME = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{NAME_CHARACTERS_MAX - 1}}}")


@dataclass(frozen=True, slots=True)
class Collection:
    """A collection as of the call that returned it.

    `id` and `created_tick` distinguish it from an earlier collection of the same name.
    """

    id: int
    name: str
    schema: pa.Schema
    primary_key: str
    partitions: tuple[str, ...]
    vchannels: tuple[str, ...]
    created_tick: int


def collection_of(info: CollectionInfo) -> Collection:
    """Return a collection of the catalog as callers see it."""
    return Collection(
        id=info.id,
        name=info.name,
        schema=decode_schema(info.schema),
        primary_key=info.primary_key,
        partitions=tuple(each.name for each in info.partitions if not each.dropped_tick),
        vchannels=info.vchannels,
        created_tick=info.created_tick,
    )


@dataclass(frozen=True, slots=True)
class Definition:
    """The definition of a new collection; valid once `checked` has returned."""

    name: str
    schema: pa.Schema
    primary_key: str
    shards: int
    partitions: Sequence[str]

    def checked(self) -> "Definition":
        """Return the normalized definition after checking all of it. Raises `InvalidArgument` or
        `SchemaMismatch`.

        Blocks: the lookup of a time zone reads files.
        """
        check_name("collection", self.name)
        shards = self.shards
        partitions = self.partitions
        if isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= SHARDS_MAX:
            raise InvalidArgument(f"shards is {shown(shards)} — choose 1 to {SHARDS_MAX}")
        schema = check_schema(self.schema, primary_key=self.primary_key)
        is_list = isinstance(partitions, Sequence) and not isinstance(partitions, str)
        names = (
            tuple(check_name("partition", each) for each in partitions[:PARTITIONS_MAX])
            if is_list
            else ()
        )
        if not is_list or len(names) >= PARTITIONS_MAX or len(set(names)) < len(names):
            raise InvalidArgument(
                f"partitions={shown(partitions)} — pass a list of up to {PARTITIONS_MAX - 1} "
                "different names"
            )
        return replace(self, schema=schema, partitions=names)


def check_text(kind: str, name: str) -> str:
    """Return `name` if it is text, so that it can be looked up; `kind` is for the error. Raises
    `InvalidArgument`.
    """
    if not isinstance(name, str):
        raise InvalidArgument(f"a {kind} name is text, not {type(name).__name__} — pass a str")
    return name


def check_name(kind: str, name: str) -> str:
    """Return `name` if a new "collection", "partition", "reader" or "producer" may have it, safe in
    paths, URLs and tables.

    Raises `InvalidArgument`.
    """
    if isinstance(name, str) and name.startswith("_"):
        reason = "is reserved: names that start with '_' are the node's — rename it"
    elif not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        reason = (
            f"is not allowed — use 1 to {NAME_CHARACTERS_MAX} of a-z, 0-9, '.', '_' and '-', "
            "starting with a letter or "
            "digit, without '..'"
        )
    else:
        return name
    raise InvalidArgument(f"{kind} name {shown(name)} {reason}")
