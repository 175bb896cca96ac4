"""A cut from its first row to its manifest on disk: when, of what, and how it becomes visible."""
