"""What to do about an error, in the words of the command line; `wal.remedy` has those of a program.

A next step is a command to run or a flag to give. The names in braces are the arguments of the command that failed and the
fields of its error; one that the command does not have stays a name in angle brackets, for people to fill in.
"""

import argparse
from collections.abc import Mapping
from types import MappingProxyType

from wal.errors import StreamingNodeError
from wal.remedy import Remedy

COMMAND_WORDS: Mapping[Remedy, str] = MappingProxyType(
    {
        Remedy.LOOK_AT_COLLECTIONS: "look which there are: streamingnode ls {directory}",
        Remedy.LOOK_AT_PARTITIONS: "look which there are: streamingnode partitions list {directory} {collection}; "
        "`partitions create` makes one",
        Remedy.USE_COLLECTION: "leave out --create to insert into it, or choose another name",
        Remedy.USE_PARTITION: "insert into it: streamingnode insert {directory} {collection} --partition {partition}",
        Remedy.START_AT_EARLIEST: "give --from start, or --from {earliest}",
        Remedy.START_AT_FIRST: "give --from start",
        Remedy.START_AT_END: "give --from end --follow for what is to come",
        Remedy.READ_TABLE: "every table has taken it: read the collection's table with whatever reads Delta, "
        "or leave out --count",
        Remedy.USE_SYNC: "that is a bug of this command: please report it",
        Remedy.OPEN_AGAIN: "run the command again",
        Remedy.USE_ITS_RELEASE: "use the release that wrote it, or a newer one",
        Remedy.READ_BACK: "see what is there before you try again: streamingnode tail {directory} {collection}",
        Remedy.VERIFY: "see what else is damaged: streamingnode verify {directory}",
        Remedy.VERIFY_ORIGINAL: "verify the original: streamingnode verify {directory}",
    }
)


def told(error: StreamingNodeError, arguments: argparse.Namespace) -> str:
    """Return the text of an error that a command with these arguments ended with."""
    if error.remedy is None:
        return error.text(None)
    known = {name: value for name, value in vars(arguments).items() if value is not None}
    return error.text(COMMAND_WORDS[error.remedy].format_map(_Known(known | error.fields())))


class _Known(dict[str, object]):
    def __missing__(self, name: str) -> str:
        return f"<{name}>"
