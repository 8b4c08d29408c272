"""The peers: one file each, listed in `benchmarks/roster.py`."""
