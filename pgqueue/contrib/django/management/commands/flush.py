"""manage.py flush, of the queue as well: it removes all data from a database, and the jobs are data of the application."""

from __future__ import annotations

from typing import Any

from django.core.management.commands import flush
from django.db import connections

from pgqueue.contrib.django.emptying import empty


class Command(flush.Command):
    """See the module. TransactionTestCase calls it behind every test."""

    def handle(self, **options: Any) -> None:
        """Django's own, and when that was confirmed, the queue's tables."""
        flushed = Flushed(connections[options["database"]])
        with flushed:
            super().handle(**options)
        if flushed.done:
            empty(connections[options["database"]])


class Flushed:
    """Whether the block has flushed this database: a user may have said no."""

    def __init__(self, connection: Any) -> None:
        self._operations = connection.ops
        self.done = False

    def __enter__(self) -> None:
        original = self._operations.execute_sql_flush

        def execute(sql_list: Any) -> Any:
            self.done = True
            return original(sql_list)

        self._operations.execute_sql_flush = execute

    def __exit__(self, *_error: object) -> None:
        del self._operations.execute_sql_flush
