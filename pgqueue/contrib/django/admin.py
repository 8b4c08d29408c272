"""The queue in Django's admin: live jobs, dead letters, workers and schedules, to look at and to act upon.

Who may view sees; who may change may cancel, retry, redrive, pause and resume; who may delete dead letters may purge them.
Nothing is added or edited: rows of the queue are changed by its own statements alone. No page counts further than `MOST`.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property
from django.utils.html import format_html

from pgqueue.contrib.django import admin_actions, options
from pgqueue.contrib.django.admin_filters import HINT, PausedFilter, QueueFilter, StateFilter, of_queue
from pgqueue.contrib.django.models import DeadLetter, Job, Schedule, Shown, Worker
from pgqueue.contrib.django.queues import DjangoQueue, queue
from pgqueue.failure import one_line

MOST = 10_000
"""Where counts stop: a page that counted ten million rows would take seconds each time it is looked at."""
WINDOW = 100_000
"""So many of the newest rows are searched for a text that no index holds."""
_SMALLEST_ID = -(2**63)


def shown_queue() -> DjangoQueue:
    """The queue that the models show."""
    return queue((options.our_aliases() or [options.DEFAULT])[0])


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts no further than one beyond MOST."""

    @cached_property
    def count(self) -> int:
        """The number of rows, at most MOST + 1."""
        rows: Any = self.object_list
        return int(rows.order_by()[: MOST + 1].count())


class LookOnly(admin.ModelAdmin):  # type: ignore[type-arg]
    """What the four have in common."""

    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 50
    sortable_by = ()
    deferred: tuple[str, ...] = ()

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """From the database that is written to: a replica may not have heard of it yet."""
        rows: QuerySet[Any] = super().get_queryset(request).using(shown_queue().database)
        match = request.resolver_match
        is_list = match is not None and str(match.url_name).endswith("_changelist")
        return rows.defer(*self.deferred) if is_list else rows

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        """All of them."""
        return [field.name for field in self.model._meta.fields]

    def lookup_allowed(self, lookup: str, value: Any, request: Any = None) -> bool:
        """Not by what is no text, number or time, such as the arguments."""
        name = lookup.partition("__")[0]
        if any(field.name == name and isinstance(field, Shown) for field in self.model._meta.fields):
            return False
        return bool(super().lookup_allowed(lookup, value, request))

    def has_add_permission(self, request: HttpRequest, *_more: Any) -> bool:
        """Jobs are enqueued."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """No form saves a row: it would write back what a worker has changed meanwhile."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """A row that is deleted behind the queue's back would leave its lane and its lease in disorder."""
        return False

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """What Django's permission "can change" stands for here."""
        return bool(request.user.has_perm(f"pgqueue.change_{self.model._meta.model_name}"))

    def has_purge_permission(self, request: HttpRequest) -> bool:
        """What Django's permission "can delete" stands for here."""
        return bool(request.user.has_perm(f"pgqueue.delete_{self.model._meta.model_name}"))

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        """With the word that counts stop."""
        hint = f"{self.model._meta.verbose_name_plural} (counted up to {MOST:,})".capitalize()
        return super().changelist_view(request, {"title": hint, **(extra_context or {})})


class JobLike(LookOnly):
    """Live jobs and dead letters: of these there may be millions."""

    search_fields = ("id",)
    search_help_text = HINT
    ordering = ("-id",)
    deferred = ("args", "kwargs", "headers", "errors")

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[Any, bool]:
        """A number is an id; `queue:` and `key:` name those; any other text is part of the name of a task."""
        term = search_term.strip()
        if not term:
            return queryset, False
        if term.isascii() and term.isdecimal():
            return (queryset.filter(id=int(term)) if len(term) < 19 else queryset.none()), False
        kind, sign, rest = term.partition(":")
        if sign and kind == "queue":
            return of_queue(queryset, rest), False
        if sign and kind == "key":
            held = Q(unique_key=rest)
            return queryset.filter(held | Q(next_key=rest) if self.model is Job else held), False
        ids: QuerySet[Any] = self.model._default_manager.using(queryset.db).order_by("-id").values_list("id", flat=True)
        # Asked for beforehand: of a subquery the planner does not know how few rows are newer, and reads the whole table.
        oldest = next(iter(ids[WINDOW : WINDOW + 1]), _SMALLEST_ID)
        return queryset.filter(id__gt=oldest, task__contains=term), False

    @admin.display(description="arguments")
    def call(self, row: Any) -> str:
        """The arguments as one line."""
        parts = [repr(value) for value in row.args or ()]
        parts += [f"{name}={value!r}" for name, value in (row.kwargs or {}).items()]
        return one_line(", ".join(parts), 2000)

    @admin.display(description="errors")
    def failures(self, row: Any) -> Any:
        """What the attempts failed with, the newest first."""
        entries = [entry for entry in row.errors or () if isinstance(entry, dict)]
        texts = [
            f"attempt {entry.get('attempt', '?')}, {entry.get('at', '?')}\n"
            f"{entry.get('traceback') or ': '.join(str(entry[key]) for key in ('type', 'message') if entry.get(key))}"
            for entry in reversed(entries)
        ]
        return format_html("<pre>{}</pre>", "\n\n".join(texts)) if texts else "-"


@admin.register(Job)
class JobAdmin(JobLike):
    """Live jobs."""

    list_display = ("id", "queue", "task", "state", "priority", "attempts", "run_at", "created_at")
    list_filter = (QueueFilter, StateFilter)
    fields = (
        *("id", "queue", "task", "state", "priority", "attempts", "lost", "cancel_requested", "created_at", "run_at"),
        *("expires_at", "timeout", "key", "lane", "call", "headers", "failures"),
    )
    actions = (admin_actions.cancel, admin_actions.retry_now)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        """All of them, and what is made of them."""
        return [*super().get_readonly_fields(request, obj), "state", "attempts", "key", "call", "failures"]

    @admin.display(description="state")
    def state(self, job: Job) -> str:
        """ready, scheduled, blocked or running; and that it is asked to stop."""
        return f"{job.state}, to be cancelled" if job.cancel_requested else str(job.state)

    @admin.display(description="unique key")
    def key(self, job: Job) -> str:
        """Its own, or that of the running job behind which it waits."""
        return f"{job.next_key}, behind the job that runs" if job.next_key is not None else job.unique_key or "-"

    @admin.display(description="attempts")
    def attempts(self, job: Job) -> str:
        """Of how many."""
        return f"{job.attempt} of {job.max_attempts}"


@admin.register(DeadLetter)
class DeadLetterAdmin(JobLike):
    """Jobs that could not be done."""

    list_display = ("id", "queue", "task", "reason", "attempt", "died_at")
    list_filter = (QueueFilter,)
    fields = (
        *("id", "queue", "task", "reason", "died_at", "attempt", "max_attempts", "lost", "priority", "created_at"),
        *("unique_key", "lane", "call", "headers", "failures"),
    )
    actions = (admin_actions.redrive, admin_actions.purge)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        """All of them, and what is made of them."""
        return [*super().get_readonly_fields(request, obj), "call", "failures"]


@admin.register(Worker)
class WorkerAdmin(LookOnly):
    """Workers that have a row."""

    list_display = ("id", "name", "hostname", "pid", "served", "concurrency", "version", "started_at", "seen_at")
    search_fields = ("name", "hostname")
    ordering = ("-id",)
    actions = ()

    @admin.display(description="queues")
    def served(self, worker: Worker) -> str:
        """In their order."""
        return ", ".join(worker.queues or ())


@admin.register(Schedule)
class ScheduleAdmin(LookOnly):
    """Schedules, of the code and made at run time."""

    list_display = ("name", "task", "queue", "rhythm", "next_at", "paused_at", "last_at")
    list_filter = (PausedFilter,)
    search_fields = ("name", "task", "queue")
    ordering = ("name",)
    actions = (admin_actions.pause, admin_actions.resume, admin_actions.run_now)

    @admin.display(description="rhythm")
    def rhythm(self, schedule: Schedule) -> str:
        """Its cron text and zone, or its interval."""
        return f"{schedule.cron} ({schedule.tz})" if schedule.cron else f"every {schedule.every or 0:g} s"
