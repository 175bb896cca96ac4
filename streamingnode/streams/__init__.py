"""Message streams over the topics of a node, streams aligned by ticks, and the service that hands
out channels.
"""
