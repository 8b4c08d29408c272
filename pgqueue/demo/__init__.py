"""`pgqueue demo`: the example application of `examples/avatars`, run, disturbed, and audited.

The rooms: `director` has the order of events, `photographs` what is uploaded, `stage` the database, `workers` the
processes (and the kill), `audit` the sums, `sheet` the picture of the result, `display` what is printed.
"""

from pgqueue.demo.errors import DemoError

__all__ = ["DemoError"]
