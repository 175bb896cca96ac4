"""What an open node tells of itself, apart from what it holds."""

from streamingnode.config import NodeConfig
from streamingnode.services import NodeServices
from streamingnode.statistics import NodeStatistics
from streamingnode.verification.scrubber import ScrubStatus
from streamingnode.writing.coalescer import Coalescer
from streamingnode.writing.results import Durability


class NodeFacts:
    """The part of `Node` that asks and changes nothing; every call answers at once, after the node closed too."""

    _services: NodeServices
    _config: NodeConfig
    _coalescer: Coalescer

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
        return self._services.statistics(self._coalescer)
