"""Fixtures of the tests of streams."""

from tests.streamingnode.streams.streams_on import everywhere

__all__ = ["everywhere"]
