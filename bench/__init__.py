"""Benchmarks of a checkout: `python -m bench`. What users run is `streamingnode bench`."""
