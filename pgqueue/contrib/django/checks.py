"""System checks: settings that are wrong, a schema that does not fit, a pool that is too small."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from django.apps import apps
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from pgqueue.contrib.django import options
from pgqueue.contrib.django.databases import unfit, url_of
from pgqueue.errors import ConfigurationError, PgQueueError, TaskError
from pgqueue.worker.options import WorkerOptions

APPLICATION = "pgqueue.contrib.django"
POOL_OF_PSYCOPG = 4
"""Connections of a psycopg pool for which no size is given."""


def settings_of(alias: str, params: Mapping[str, Any]) -> list[checks.CheckMessage]:
    """What is wrong with one entry of TASKS. Nothing is connected."""
    where = f"TASKS[{alias!r}]"
    try:
        chosen = options.read(params)
    except ConfigurationError as error:
        return [checks.Error(f"{where}: {error}", id="pgqueue.E001")]
    if not apps.is_installed(APPLICATION):
        hint = "Its schema is migrated with your own, and tasks are looked for in your applications."
        return [checks.Error(f"{where}: {APPLICATION!r} is not in INSTALLED_APPS.", hint=hint, id="pgqueue.E002")]
    try:
        database = _database(alias)
        if problem := unfit(database):
            return [checks.Error(f"{where}: {problem}", id="pgqueue.E003")]
    except ImproperlyConfigured as error:
        return [checks.Error(str(error), id="pgqueue.E003")]
    found: list[checks.CheckMessage] = []
    if chosen.defaults.keep_seconds is not None and not chosen.settings.archive:
        hint = "Leave `archive` out, or say {'defaults': {'keep_result': False}}."
        message = f"{where}: with archive=False nothing is left of a job that a result could be read from."
        found.append(checks.Warning(message, hint=hint, id="pgqueue.W002"))
    found += [checks.Error(f"{where}: {problem}", id="pgqueue.E004") for problem in _clashes(alias)]
    if problem := pool_too_small(database, WorkerOptions().concurrency):
        hint = "Make the pool as large, or start workers with as small a --concurrency."
        found.append(checks.Warning(f"{where}: {problem}", hint=hint, id="pgqueue.W003"))
    return found


def pool_too_small(database: str, concurrency: int) -> str | None:
    """Why jobs of a worker would wait for each other's connections, in one sentence; None where they would not."""
    pool = connections[database].settings_dict.get("OPTIONS", {}).get("pool")
    if not pool:
        return None
    sizes = pool if isinstance(pool, Mapping) else {}
    least = sizes.get("min_size", POOL_OF_PSYCOPG)
    most = sizes.get("max_size") or least
    if most >= concurrency:
        return None
    return (
        f"the pool of database {database!r} has at most {most} connections, and a worker runs {concurrency} jobs at once, "
        "each with one of its own"
    )


def check_schema(
    *, app_configs: Sequence[Any] | None = None, databases: Sequence[str] | None = None, **_kwargs: Any
) -> Iterator[checks.CheckMessage]:
    """Whether the schema of every backend fits, in the databases that may be looked into."""
    if not databases or sys.argv[1:2] == ["migrate"]:
        return  # or it is about to be made to fit
    from pgqueue import migrate
    from pgqueue.contrib.django.queues import queue

    for alias in options.our_aliases():
        try:
            app = queue(alias)
            if app.database not in databases or unfit(app.database):
                continue
        except ImproperlyConfigured:
            continue  # said of the settings already
        try:
            found = migrate.check(url_of(app.database), app.settings.schema)
        except PgQueueError as error:
            yield checks.Warning(f"TASKS[{alias!r}]: {error}", id="pgqueue.W001")
            continue
        if not found.fits:
            sentence = found.sentence.replace("`pgqueue migrate`", "`manage.py migrate`")
            yield checks.Warning(f"TASKS[{alias!r}]: {sentence}", id="pgqueue.W001")


def _clashes(alias: str) -> list[str]:
    from pgqueue.contrib.django.queues import queue

    tasks: Any = queue(alias).tasks
    try:
        list(tasks)  # which fills it
    except (ConfigurationError, TaskError) as error:
        return [str(error)]
    return list(tasks.clashes)


def _database(alias: str) -> str:
    from pgqueue.contrib.django.queues import queue

    return queue(alias).database
