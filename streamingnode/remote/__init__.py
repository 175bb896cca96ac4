"""Connections to a node: server, client and the protocol between them (docs/protocol.md)."""
