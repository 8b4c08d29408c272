"""The tables of the queue as models, to look at: Django neither makes nor changes them, and nothing is saved through them.

They show the queue of the first backend of ours, "default" where there is one.
"""

from __future__ import annotations

import json
from typing import Any

from django.db import NotSupportedError, models

from pgqueue.contrib.django import options
from pgqueue.errors import ConfigurationError
from pgqueue.job import JobState


def _schema() -> str:
    for alias in options.our_aliases()[:1]:
        try:
            return options.read(options.task_settings()[alias]).settings.schema
        except ConfigurationError:
            break  # the system check says it
    return "pgqueue"


SCHEMA = _schema()


def _table(name: str) -> str:
    return f'"{SCHEMA}"."{name}"'


class Shown(models.Field):  # type: ignore[type-arg]
    """A column that is only looked at, as the driver reads it."""

    def db_type(self, connection: Any) -> str:
        """Never asked for."""
        return "text"


class ShownJson(Shown):
    """A JSON column: the driver decodes one of type json, and gives one of type jsonb as text."""

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """The value, decoded."""
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError:
            return value


class ShownTime(models.DateTimeField):  # type: ignore[type-arg]
    """A time. Infinity, which a row may hold, is none that Python has."""

    def select_format(self, compiler: Any, sql: str, params: Any) -> tuple[str, Any]:
        """Without what is beyond Python's years, as in the queue's own statements."""
        within = f"CASE WHEN {sql} >= '0001-01-02' AND {sql} < '9999-12-30' THEN {sql} END"
        return within, (*params, *params, *params)


def refuse(**_kwargs: Any) -> None:
    """NotSupportedError at every save, that of `loaddata` too: a job that it wrote would run once more."""
    raise NotSupportedError(
        "jobs are enqueued, and nothing is saved through the models of pgqueue: leave such rows out, "
        "as `loaddata --exclude pgqueue` does"
    )


class Job(models.Model):
    """A live job."""

    id = models.BigIntegerField(primary_key=True)
    queue = models.TextField()
    task = models.TextField()
    args = ShownJson()
    kwargs = ShownJson()
    priority = models.SmallIntegerField()
    position = models.BigIntegerField(null=True)
    run_at = ShownTime(null=True)
    attempt = models.IntegerField()
    max_attempts = models.IntegerField()
    lost = models.IntegerField()
    lease_id = models.BigIntegerField(null=True, verbose_name="token")
    cancel_requested = models.BooleanField()
    timeout = models.FloatField(null=True)
    headers = ShownJson()
    errors = ShownJson()
    created_at = ShownTime()
    expires_at = ShownTime(null=True)
    unique_key = models.TextField(null=True)
    lane = models.TextField(null=True, verbose_name="key")
    admitted = models.BooleanField(null=True)
    next_key = models.TextField(null=True)

    class Meta:
        managed = False
        db_table = _table("job")
        verbose_name = "live job"

    def __str__(self) -> str:
        return f"{self.task} {self.id}"

    @property
    def state(self) -> JobState:
        """Derived, as everywhere: it is stored nowhere."""
        if self.lease_id is not None:
            return JobState.RUNNING
        if self.run_at is not None or self.next_key is not None:
            return JobState.SCHEDULED
        if self.position is not None:
            return JobState.READY
        return JobState.SCHEDULED if self.lane is None else JobState.BLOCKED  # one that was parked by hand has no time


class DeadLetter(models.Model):
    """A job that could not be done."""

    id = models.BigIntegerField(primary_key=True)
    queue = models.TextField()
    task = models.TextField()
    args = ShownJson()
    kwargs = ShownJson()
    priority = models.SmallIntegerField()
    attempt = models.IntegerField()
    max_attempts = models.IntegerField()
    lost = models.IntegerField()
    headers = ShownJson()
    errors = ShownJson()
    created_at = ShownTime()
    reason = models.TextField()
    died_at = ShownTime()
    unique_key = models.TextField(null=True)
    lane = models.TextField(null=True, verbose_name="key")

    class Meta:
        managed = False
        db_table = _table("dead_letter")
        verbose_name = "dead letter"

    def __str__(self) -> str:
        return f"{self.task} {self.id}"


class Worker(models.Model):
    """A worker process that has a row."""

    id = models.BigIntegerField(primary_key=True)
    name = models.TextField()
    hostname = models.TextField()
    pid = models.IntegerField()
    version = models.TextField()
    queues = Shown()
    concurrency = models.IntegerField()
    lease_seconds = models.FloatField()
    started_at = ShownTime()
    seen_at = ShownTime()
    completed = ShownJson()
    circuits = ShownJson(null=True)

    class Meta:
        managed = False
        db_table = _table("worker")
        verbose_name = "worker"

    def __str__(self) -> str:
        return self.name


class Schedule(models.Model):
    """A schedule, of the code or made at run time."""

    name = models.TextField(primary_key=True)
    cron = models.TextField(null=True)
    every = models.FloatField(null=True)
    tz = models.TextField()
    missed = models.TextField()
    grace = models.FloatField()
    overlap = models.BooleanField()
    queue = models.TextField()
    task = models.TextField()
    args = ShownJson()
    kwargs = ShownJson()
    next_at = ShownTime(null=True)
    paused_at = ShownTime(null=True)
    last_at = ShownTime(null=True)
    last_job_id = models.BigIntegerField(null=True)

    class Meta:
        managed = False
        db_table = _table("schedule")
        verbose_name = "schedule"

    def __str__(self) -> str:
        return self.name
