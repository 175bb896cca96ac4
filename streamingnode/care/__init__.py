"""Tools for a node's directory: inspect, verify, back up, restore and export it. The engine does
not use them.
"""
