"""A private PostgreSQL for development, tests and small installations: no service, no port, no password.

It is started on demand, shared by every process that names the same folder, and stopped by its last user.
"""

from pgqueue.embedded.binaries import find_binaries
from pgqueue.embedded.server import Server, start

__all__ = ["Server", "find_binaries", "start"]
