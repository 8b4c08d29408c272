"""The PgQueue behind a backend: on Django's own connections, with the tasks that its modules have defined."""

from __future__ import annotations

import dataclasses
import difflib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import connections, router

from pgqueue.client import PgQueue
from pgqueue.config import Settings
from pgqueue.contrib.django import options
from pgqueue.contrib.django.databases import places_of_all, unfit, url_of
from pgqueue.contrib.django.framework_task import defined, place_of
from pgqueue.contrib.django.running import AroundJobs, FrameworkTask
from pgqueue.contrib.django.times import as_aware
from pgqueue.errors import ConfigurationError, DuplicateTask, SchemaError
from pgqueue.job import Job
from pgqueue.ops import Op
from pgqueue.ops.unique import told_new
from pgqueue.task import BaseTask, Registry, TaskOptions

T = TypeVar("T")
APPLICATION = "pgqueue.contrib.django"


class DjangoRegistry(Registry):
    """The tasks that were defined in this process, whatever their backend: `.using(backend=…)` may send any of them here.

    `clashes`: what is wrong with those that have a name of a task of the queue alone, and so are not here.
    """

    def __init__(self, queue: DjangoQueue, served: Sequence[str]) -> None:
        super().__init__()
        self.clashes: list[str] = []
        self._queue = queue
        self._served = served
        self._seen = 0
        self._adopting = False
        self._filling = threading.RLock()

    def find(self, name: str) -> BaseTask[..., Any]:
        """See Registry."""
        self._fill()
        return super().find(name)

    def queues(self) -> list[str]:
        """What a worker serves: QUEUES of the backend; where that is empty, the queues of its tasks; if it has none, those
        of all tasks, since `.using(backend=…)` sends them here."""
        if self._served:
            plain = {task.defaults.queue for task in self.values() if not isinstance(task, FrameworkTask)}
            return sorted({*self._served, *plain})
        here = [
            task for task in self.values() if not isinstance(task, FrameworkTask) or task.backend == self._queue.alias
        ]
        return sorted({task.defaults.queue for task in here or self.values()})

    def __getitem__(self, name: str) -> BaseTask[..., Any]:
        self._fill()
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        self._fill()
        return super().__iter__()

    def __len__(self) -> int:
        self._fill()
        return super().__len__()

    def _fill(self) -> None:
        if self._seen == defined.number:
            return
        with self._filling:
            if self._adopting:
                return
            self._adopting = True
            try:
                number = defined.number
                self._adopt()
                self._seen = number
            finally:
                self._adopting = False

    def _adopt(self) -> None:
        clashes = []
        for name, task in list(defined.tasks.items()):
            known = self._tasks.get(name)
            if not isinstance(known, FrameworkTask) or known.django_task.func is not task.func:
                adopted = FrameworkTask(self._queue, task, name, self._queue.options_of(task))
                try:
                    self.add(adopted, getattr(task, "aliases", ()))
                except DuplicateTask as error:
                    clashes.append(str(error))  # with a task of this queue alone; the others work all the same
        self.clashes = clashes
        for one in list(defined.schedules):
            known = self._tasks.get(defined.name_of(one.task))
            if one.task.backend == self._queue.alias and isinstance(known, FrameworkTask):
                self._queue.schedule(**one.options)(known)


class DjangoQueue(PgQueue):
    """A PgQueue on Django's connections: what is called without `using` runs in the transaction that the application is in,
    or commits by itself where there is none.

    `alias` names the entry of TASKS, `database` that of DATABASES.
    """

    home = f"{APPLICATION}.app"

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        chosen = options.read(params)
        self.alias = alias
        self.defaults = chosen.defaults
        self._database = chosen.database
        self._located: tuple[tuple[str, Any], Settings] | None = None
        self._made = False
        super().__init__(None)
        self.settings = chosen.settings
        self.tasks = DjangoRegistry(self, sorted(params.get("QUEUES", ["default"])))
        self.middleware(AroundJobs(self))
        self._made = True

    @property
    def database(self) -> str:
        """The alias of its database: what OPTIONS say, or to which the routers write."""
        if self._database is not None:
            return self._database
        if not apps.is_installed(APPLICATION):
            raise ImproperlyConfigured(f"put {APPLICATION!r} into INSTALLED_APPS: its schema is migrated with your own")
        return str(router.db_for_write(apps.get_model("pgqueue", "Job")))

    def told(self) -> dict[str, Any]:
        """See Controls: where the databases are, which a test runner has moved."""
        return {"databases": places_of_all()}

    @property
    def settings(self) -> Settings:
        """With the URL of Django's database as it is now: a test runner gives it another name."""
        given = self._given
        if given.database_url is not None or not self._made:
            return given  # a module may ask for the queue before Django knows its models
        key = (self.database, self._connection().settings_dict["NAME"])
        if self._located is None or self._located[0] != key:
            self._located = (key, dataclasses.replace(given, database_url=url_of(key[0])))
        return self._located[1]

    @settings.setter
    def settings(self, value: Settings) -> None:
        self._given = value
        self._located = None

    def options_of(self, task: Any) -> TaskOptions:
        """With what jobs of this task are enqueued."""
        given = dict(getattr(task, "options", {}))
        chosen = self.defaults.changed(given) if given else self.defaults
        return dataclasses.replace(
            chosen, queue=task.queue_name, priority=int(task.priority), run_at=as_aware(task.run_after)
        )

    def enqueue_task(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, bool]:
        """Enqueue a call of a task of Django's framework; returns the job's id, and whether the call has made that job."""
        defined.add(task)
        name = defined.name_of(task)
        known = self.tasks.find(name)
        if not isinstance(known, FrameworkTask) or place_of(known.django_task) != place_of(task):
            raise DuplicateTask(f"two tasks are named {name!r}: give one of them name=…")
        chosen = known.defaults if known.django_task is task else self.options_of(task)
        return self.run(told_new(self.enqueue_op(known, chosen, args, kwargs)))

    def run(self, op: Op[T], using: Any = None, *, atomic: bool = False) -> T:
        """Run one operation in the transaction of `using`, or on Django's connection; the errors are those of Django."""
        try:
            if using is not None:
                return super().run(op, using, atomic=atomic)
            connection = self._connection()
            with connection.wrap_database_errors:
                connection.validate_no_broken_transaction()
                return super().run(op, connection, atomic=atomic)
        except SchemaError as error:
            raise SchemaError(str(error).replace("`pgqueue migrate`", "`manage.py migrate`")) from error.__cause__

    def claim(
        self, queues: Sequence[str] | str, *, limit: int = 1, lease: float = 30.0, using: Any = None
    ) -> list[Job]:
        """See PgQueue. In a transaction of the application it is part of that, as with `using`."""
        own = using is None and bool(self._connection().get_autocommit())
        return self.run(self.claim_op(queues, limit=limit, lease=lease, own=own), using)

    def _connection(self) -> Any:
        if problem := unfit(self.database):
            raise ImproperlyConfigured(problem)
        return connections[self.database]


_queues: dict[str, DjangoQueue] = {}
_lock = threading.RLock()


def queue(backend: str = options.DEFAULT) -> DjangoQueue:
    """The PgQueue behind this entry of TASKS, one per process; ImproperlyConfigured where there is none."""
    with _lock:
        found = _queues.get(backend)
        if found is None:
            found = _queues[backend] = _made(backend)
        return found


def _made(backend: str) -> DjangoQueue:
    known = options.task_settings()
    params = known.get(backend)
    if params is None:
        near = difflib.get_close_matches(backend, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"give it the BACKEND '{APPLICATION}.PgQueueBackend'"
        raise ImproperlyConfigured(f"TASKS has no {backend!r}: {hint}")
    if not options.is_ours(params):
        raise ImproperlyConfigured(
            f"TASKS[{backend!r}] has another BACKEND, {params.get('BACKEND')!r}: ours is '{APPLICATION}.PgQueueBackend'"
        )
    try:
        return DjangoQueue(backend, params)
    except ConfigurationError as error:
        raise ImproperlyConfigured(f"TASKS[{backend!r}]: {error}") from error


def _forget(*, setting: str, **_kwargs: Any) -> None:
    """Tests change settings."""
    if setting == "TASKS":
        with _lock:
            _queues.clear()


setting_changed.connect(_forget, dispatch_uid="pgqueue.queues")
