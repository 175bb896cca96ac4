"""The read path: catch-up, tailing, ordering and transaction assembly."""
