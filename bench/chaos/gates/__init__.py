"""The gates, one fault each: what is done to a node, how often, and what counts as a failure."""
