"""Tools for a node's directory: look at it, verify it, back it up, restore it, take its rows out.
The engine uses none.
"""
