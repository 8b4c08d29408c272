"""The worker. Start with `worker.py`; every other file is one of its parts."""

from pgqueue.worker.options import WorkerOptions
from pgqueue.worker.worker import Worker

__all__ = ["Worker", "WorkerOptions"]
