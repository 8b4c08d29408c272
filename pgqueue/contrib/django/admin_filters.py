"""Filters of the admin that stay fast: what they offer is read from indexes, and what they ask for an index can find."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.db.models.expressions import RawSQL
from django.http import HttpRequest

from pgqueue.contrib.django import options
from pgqueue.contrib.django.models import SCHEMA, Job
from pgqueue.contrib.django.queues import queue
from pgqueue.job import JobState
from pgqueue.ops.status import queue_names

HINT = "An id; queue:NAME; key:UNIQUE KEY; or a part of the task's name, looked for among the newest 100,000."
_HELD = f'SELECT unnest(job_ids) FROM "{SCHEMA}".lease'  # noqa: S608 - a validated name

# In one of these ranges is every live job. Said beside a queue they let the planner read the indexes that begin with it.
SOMEWHERE = (
    Q(position__isnull=False)
    | Q(run_at__isnull=False)
    | Q(lane__isnull=False, admitted__isnull=True, run_at__isnull=True)
)


def of_queue(rows: QuerySet[Any], name: str) -> QuerySet[Any]:
    """Jobs or dead letters of that queue, found by an index."""
    if "\0" in name:
        return rows.none()  # PostgreSQL has no such text
    chosen = rows.filter(queue=name)
    return chosen.filter(SOMEWHERE) if rows.model is Job else chosen


class QueueFilter(admin.SimpleListFilter):
    """By queue. The names are those that hold something, found by jumping along an index."""

    title = "queue"
    parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Every queue that holds something or has a setting."""
        app = queue((options.our_aliases() or [options.DEFAULT])[0])
        return [(name, name) for name in app.run(queue_names())]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Of that queue."""
        return queryset if (name := self.value()) is None else of_queue(queryset, name)


class StateFilter(admin.SimpleListFilter):
    """By state, which is derived from the row."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """The four of live jobs."""
        return [(state.value, state.value) for state in list(JobState)[:4]]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """In that state."""
        match self.value():
            case JobState.RUNNING:
                # From the leases, of which there are few: no index knows who runs, so that claims stay cheap.
                return queryset.filter(lease_id__isnull=False, id__in=RawSQL(_HELD, ()))  # noqa: S611 - nothing of a user's is in it
            case JobState.SCHEDULED:
                return queryset.filter(lease_id__isnull=True, run_at__isnull=False)
            case JobState.BLOCKED:
                waiting = {"lane__isnull": False, "admitted__isnull": True, "run_at__isnull": True}
                return queryset.filter(lease_id__isnull=True, position__isnull=True, **waiting)
            case JobState.READY:
                return queryset.filter(lease_id__isnull=True, run_at__isnull=True, position__isnull=False)
        return queryset


class PausedFilter(admin.SimpleListFilter):
    """Schedules that are paused, or not."""

    title = "paused"
    parameter_name = "paused"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Yes and no."""
        return [("yes", "Yes"), ("no", "No")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Those."""
        return queryset if self.value() is None else queryset.filter(paused_at__isnull=self.value() == "no")
