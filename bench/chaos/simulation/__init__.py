"""A whole node in a world of its own: virtual time, a seeded schedule, disks that fail and forget."""
