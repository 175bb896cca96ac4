"""Streams of messages over the channels of a message queue, and the service that names channels: `docs/streams.md`."""
