"""What to do about an error, apart from the words for it: a program passes an argument, a command line takes a flag. Pure.

Most next steps read the same for everybody and are plain text. One that is done differently from a program and from a
command line is a `Remedy`: where the error is raised nobody knows who will show it. Its value is how a program does it;
`streamingnode.cli.remedies` has the words of the command line, for every one of them.
"""

from enum import Enum, unique


@unique
class Remedy(Enum):
    """A next step in the words of a program; the names in braces are fields of its error."""

    LOOK_AT_COLLECTIONS = "create it first, or look with collections()"
    LOOK_AT_PARTITIONS = "create_partition() makes it, collection() tells which there are"
    USE_COLLECTION = "pass if_not_exists=True to use it, or choose another name"
    USE_PARTITION = "pass if_not_exists=True to use it"
    START_AT_EARLIEST = "start from {earliest} or DeliverPolicy.all()"
    START_AT_FIRST = "use DeliverPolicy.all()"
    START_AT_END = "use DeliverPolicy.latest() for what is to come"
    READ_TABLE = (
        "every table has taken it: read the collection's table, with spark_sink.read_table or whatever reads Delta"
    )
    USE_SYNC = "call it on the loop that opened it; from a thread use sn.sync"
    OPEN_AGAIN = "open the node again"
    USE_ITS_RELEASE = "open it with the release that wrote it, or a newer one"
    READ_BACK = "read back once the log is open again"
    VERIFY = "see what else is damaged: streamingnode verify, or node.verify()"
    VERIFY_ORIGINAL = "verify the original: streamingnode verify, or node.verify()"
