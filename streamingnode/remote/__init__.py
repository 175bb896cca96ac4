"""The node over a connection: server and client, and what they say to each other
(docs/protocol.md).
"""
