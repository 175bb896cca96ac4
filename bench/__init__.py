"""Benchmarks of a checkout: `python -m bench`. What users can run too is in `streamingnode.benchmark`."""
