"""RocksMQ: topics that consumer groups share, in the database of a node, on the same writer thread
as its log.
"""
