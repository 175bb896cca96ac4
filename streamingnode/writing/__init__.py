"""From checked batches to append groups and back to each caller's result."""
