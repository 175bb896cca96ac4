"""Real faults on real nodes: kills, power cuts, failing disks, flipped bits; see `python -m bench.chaos --help`."""
