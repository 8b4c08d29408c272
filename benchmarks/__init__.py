"""The benchmark of pgqueue beside other queues: ``python -m benchmarks``. Not part of the wheel.

`peers/` holds one small file per peer; `cases.py` says what is measured of them, with the targets of the comparison. What is
measured of pgqueue itself, and how runs take turns, is in `pgqueue.bench`.
"""
