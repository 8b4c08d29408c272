"""Where workers find the queues: ``--app pgqueue.contrib.django.app``, or ``…app:queues.NAME`` for another entry of TASKS.

Importing it sets Django up, also in the child processes of a worker, where databases are those of the parent.
"""

from __future__ import annotations

from typing import Any

import django
from django.apps import apps

from pgqueue.contrib.django.databases import be_where_the_parent_is

if not apps.ready:
    be_where_the_parent_is()
    django.setup()

from pgqueue.contrib.django import options
from pgqueue.contrib.django.queues import DjangoQueue, queue


class Queues:
    """An attribute for each entry of TASKS that is ours."""

    def __getattr__(self, alias: str) -> DjangoQueue:
        if alias not in options.our_aliases():
            raise AttributeError(alias)
        return queue(alias)

    def __dir__(self) -> list[str]:
        return options.our_aliases()


queues = Queues()


def __getattr__(name: str) -> Any:
    if name == "pq" and (aliases := options.our_aliases()):
        return queue(aliases[0])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
