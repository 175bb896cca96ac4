"""What an open node tells of itself, apart from what it holds."""

import asyncio

from streamingnode.config import NodeConfig
from streamingnode.services import NodeServices
from streamingnode.statistics import NodeStatistics
from streamingnode.verification.scrubber import ScrubStatus
from streamingnode.writing.coalescer import Coalescer
from streamingnode.writing.results import Durability
from wal.errors import InvalidArgument


class NodeFacts:
    """The part of `Node` that asks and changes nothing; every call answers at once, after the node closed too."""

    _services: NodeServices
    _config: NodeConfig
    _coalescer: Coalescer
    _loop: asyncio.AbstractEventLoop

    @property
    def path(self) -> str | None:
        """The node's directory; None for one in memory."""
        return self._services.path

    @property
    def node_id(self) -> str:
        """Identity of the node's data, made when it was first opened."""
        return self._services.node_id

    @property
    def durability(self) -> Durability:
        """What an acknowledged write means: `fsync`, or `os` when the node was opened so."""
        return self._services.durability

    @property
    def config(self) -> NodeConfig:
        """The settings the node runs with."""
        return self._config

    @property
    def scrub_status(self) -> ScrubStatus:
        """What the background scrubber found in its last round."""
        return self._services.upkeep.scrub_status

    def statistics(self) -> NodeStatistics:
        """Return what the node counts and measures, as of now; under 1 ms, so ask once a second, not once an insert."""
        self._check_loop()
        return self._services.statistics(self._coalescer)

    def _check_loop(self) -> None:
        """Raise unless this is the node's event loop: a look from a thread could meet an append half way."""
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if not here:
            raise InvalidArgument(
                "the node is used on another event loop than its own — call it on the loop that opened it; "
                "from a thread use sn.sync"
            )
