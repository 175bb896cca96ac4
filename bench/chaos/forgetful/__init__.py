"""A file system that forgets, at an order, what nobody synced; Linux, root. Why our own: `docs/adr/0011-power-cuts.md`."""
