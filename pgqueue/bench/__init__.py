"""The benchmark of pgqueue itself, without peers: `pgqueue bench`. The peers live in `benchmarks/` of the repository.

A measurement is a list of cases; the cases of a round run in turn, several rounds long, so that what the machine does
meanwhile meets all of them alike. `suite.py` says which measurements there are, `turns.py` runs them.
"""
