"""Which transactions have committed lately, so that a commit that is repeated by its id hears what became of the first.

Pure. In come ids of committed transactions, from the live append path and from the log as it is read again. An id is the
tick of its begin. What is forgotten, or lies before what was read, raises a bound: of an id at or below it nobody can say
any more whether it committed, and nobody guesses.
"""

from collections import OrderedDict

COMMITS_MAX = 4096
"""More than a client may have in doubt; an id costs some 100 bytes."""


class Commits:
    """The ids of the latest commits; nobody knows of others at or below `known_after`."""

    __slots__ = ("_ids", "known_after")

    def __init__(self, *, known_after: int = 0) -> None:
        self.known_after = known_after
        self._ids: OrderedDict[int, None] = OrderedDict()

    def add(self, txn_id: int) -> None:
        """Remember a commit, and forget the oldest one for it when there are too many."""
        self._ids[txn_id] = None
        if len(self._ids) > COMMITS_MAX:
            forgotten, _ = self._ids.popitem(last=False)
            self.known_after = max(self.known_after, forgotten)

    def __contains__(self, txn_id: int) -> bool:
        """Whether the transaction is known to have committed."""
        return txn_id in self._ids
