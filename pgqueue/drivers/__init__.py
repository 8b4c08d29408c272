"""Drivers: what runs an operation on a connection. One loop for sync, one for async, and the way from whatever connection
a caller owns to the psycopg connection beneath it. Nothing here commits, rolls back or changes session state."""
