"""A node's cuts as a table sees them: in order, verified, and what they change."""
