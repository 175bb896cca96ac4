"""Copies of a whole node: made while it runs, verified before they are called good, and turned into a node again."""
