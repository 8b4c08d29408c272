"""Bulk actions of the admin: each shows first what it would concern, then does it with the queue's own operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models import QuerySet
from django.http import HttpRequest
from django.template.response import TemplateResponse

from pgqueue.contrib.django import options
from pgqueue.contrib.django.queues import DjangoQueue, queue
from pgqueue.errors import PgQueueError
from pgqueue.ops.rescue import hasten

AT_ONCE = 10_000
"""So many rows at most are concerned by one action: a request must end."""
Action = Callable[[Any, HttpRequest, QuerySet[Any]], Any]


class Plan(NamedTuple):
    """What an action would do: a question with its numbers, and the words of the button."""

    question: str
    button: str
    concerned: int


class Chosen(NamedTuple):
    """The rows of an action, by their keys; `more`: there are more than one action may concern."""

    keys: Sequence[Any]
    more: bool


def _app() -> DjangoQueue:
    return queue((options.our_aliases() or [options.DEFAULT])[0])


def _chosen(rows: QuerySet[Any]) -> Chosen:
    keys = list(rows.order_by("pk").values_list("pk", flat=True)[: AT_ONCE + 1])
    return Chosen(keys[:AT_ONCE], len(keys) > AT_ONCE)


def _confirmed(
    name: str,
    description: str,
    permission: str,
    plan: Callable[[QuerySet[Any], Chosen], Plan],
    do: Callable[[DjangoQueue, QuerySet[Any], Chosen], str],
) -> Action:
    """An action with a page in between, which says what would happen and changes nothing."""

    @admin.action(description=description, permissions=[permission])
    def action(model_admin: Any, request: HttpRequest, queryset: QuerySet[Any]) -> Any:
        chosen = _chosen(queryset)
        if request.POST.get("confirmed") == "yes":
            _carry_out(model_admin, request, lambda: do(_app(), queryset, chosen), chosen)
            return None
        planned = plan(queryset, chosen)
        context = {
            **model_admin.admin_site.each_context(request),
            "title": description,
            "opts": model_admin.model._meta,
            "plan": planned,
            "more": AT_ONCE if chosen.more else 0,
            "action": name,
            "checkbox": ACTION_CHECKBOX_NAME,
            "selected": request.POST.getlist(ACTION_CHECKBOX_NAME),
            "across": request.POST.get("select_across", "0"),
            "media": model_admin.media,
        }
        return TemplateResponse(request, "admin/pgqueue/confirm.html", context)

    action.__name__ = name
    return action


def _at_once(name: str, description: str, do: Callable[[DjangoQueue, Any], None], done: str) -> Action:
    """An action that can be taken back, or harms nobody: without the page in between."""

    @admin.action(description=description, permissions=["operate"])
    def action(model_admin: Any, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        def carry_out() -> str:
            for key in chosen.keys:
                do(_app(), key)
            return f"{_counted(len(chosen.keys), 'schedule')} {done}."

        chosen = _chosen(queryset)
        _carry_out(model_admin, request, carry_out, chosen)

    action.__name__ = name
    return action


def _carry_out(model_admin: Any, request: HttpRequest, do: Callable[[], str], chosen: Chosen) -> None:
    try:
        said = do()
    except PgQueueError as error:
        model_admin.message_user(request, str(error), messages.ERROR)
        return
    if chosen.more:
        said += f" There are more than {AT_ONCE:,}: do it again, or use the command line."
    model_admin.message_user(request, said, messages.SUCCESS)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


# Live jobs


def _plan_cancel(rows: QuerySet[Any], chosen: Chosen) -> Plan:
    running = rows.model._default_manager.using(rows.db).filter(pk__in=chosen.keys, lease_id__isnull=False).count()
    waiting = len(chosen.keys) - running
    question = (
        f"{_counted(waiting, 'job')} would end at once as cancelled; "
        f"{_counted(running, 'running job')} would be asked to stop."
    )
    return Plan(question, "Yes, cancel them", len(chosen.keys))


def _do_cancel(app: DjangoQueue, rows: QuerySet[Any], chosen: Chosen) -> str:
    fates = list(app.cancel(chosen.keys).values())
    return (
        f"{_counted(fates.count('cancelled'), 'job')} cancelled, "
        f"{_counted(fates.count('requested'), 'running job')} asked to stop."
    )


def _later(rows: QuerySet[Any], chosen: Chosen) -> QuerySet[Any]:
    of_the_model: QuerySet[Any] = rows.model._default_manager.using(rows.db)
    return of_the_model.filter(pk__in=chosen.keys, lease_id__isnull=True, run_at__isnull=False, next_key__isnull=True)


def _plan_retry(rows: QuerySet[Any], chosen: Chosen) -> Plan:
    number = _later(rows, chosen).count()
    return Plan(
        f"{_counted(number, 'job')} of {len(chosen.keys):,} wait for a time and would be in line at once.",
        "Yes, retry them now",
        number,
    )


def _do_retry(app: DjangoQueue, rows: QuerySet[Any], chosen: Chosen) -> str:
    by_queue: dict[str, list[int]] = {}
    for key, name in _later(rows, chosen).values_list("pk", "queue"):
        by_queue.setdefault(name, []).append(key)
    moved = sum(len(app.run(hasten(name, keys, channel=app.channel))) for name, keys in by_queue.items())
    return f"{_counted(moved, 'job')} put into line."


cancel = _confirmed("cancel", "Cancel selected jobs", "operate", _plan_cancel, _do_cancel)
retry_now = _confirmed("retry_now", "Retry selected jobs now", "operate", _plan_retry, _do_retry)


# Dead letters


def _plan_redrive(rows: QuerySet[Any], chosen: Chosen) -> Plan:
    number = _app().count_dead_letters(ids=chosen.keys)
    return Plan(
        f"{_counted(number, 'dead letter')} would go back into their queues, with all attempts anew.",
        "Yes, redrive them",
        number,
    )


def _do_redrive(app: DjangoQueue, rows: QuerySet[Any], chosen: Chosen) -> str:
    return f"{_counted(len(app.redrive(ids=chosen.keys)), 'dead letter')} redriven."


def _plan_purge(rows: QuerySet[Any], chosen: Chosen) -> Plan:
    number = _app().count_dead_letters(ids=chosen.keys)
    return Plan(f"{_counted(number, 'dead letter')} would be deleted for good.", "Yes, purge them", number)


def _do_purge(app: DjangoQueue, rows: QuerySet[Any], chosen: Chosen) -> str:
    return f"{_counted(app.purge(ids=chosen.keys), 'dead letter')} purged."


redrive = _confirmed("redrive", "Redrive selected dead letters", "operate", _plan_redrive, _do_redrive)
purge = _confirmed("purge", "Purge selected dead letters", "purge", _plan_purge, _do_purge)


# Schedules

pause = _at_once("pause", "Pause selected schedules", lambda app, name: app.pause_schedule(name), "paused")
resume = _at_once("resume", "Resume selected schedules", lambda app, name: app.resume_schedule(name), "resumed")
run_now = _at_once(
    "run_now", "Enqueue the jobs of selected schedules now", lambda app, name: _run_schedule(app, name), "run"
)


def _run_schedule(app: DjangoQueue, name: str) -> None:
    app.run_schedule(name)
