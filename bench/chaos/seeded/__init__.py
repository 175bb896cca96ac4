"""Bugs put into the node on purpose, to see whether the judge of histories finds them. Never reachable from the product."""
