"""From cuts to tables, each cut once: the job, its attempts and commits, locks and leases."""
