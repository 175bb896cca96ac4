"""Message streams over the topics of a node, tick-aligned streams, and the channel service."""
