"""manage.py dumpdata, without the queue: its rows are nothing that could be loaded, see `models.refuse`."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError
from django.core.management.commands import dumpdata

from pgqueue.contrib.django.revisions import LABEL


class Command(dumpdata.Command):
    """See the module."""

    def handle(self, *app_labels: str, **options: Any) -> None:
        """Django's own, of the other applications."""
        if any(label.partition(".")[0] == LABEL for label in app_labels):
            raise CommandError("the queue is not dumped: jobs that were loaded would run a second time")
        super().handle(*app_labels, **{**options, "exclude": [*(options.get("exclude") or ()), LABEL]})
