"""What a node directory holds and whether all is well, without opening the node."""
