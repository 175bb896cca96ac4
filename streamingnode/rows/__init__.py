"""Rows as callers give them, checked and made into Arrow batches, one for each shard."""
