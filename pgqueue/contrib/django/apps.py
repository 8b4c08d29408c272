"""The application, for INSTALLED_APPS."""

from __future__ import annotations

import sys
from typing import Any

from django.apps import AppConfig, apps
from django.core import checks
from django.db.models.signals import post_migrate, pre_save
from django.utils.module_loading import autodiscover_modules

from pgqueue.contrib.django import options


class PgQueueConfig(AppConfig):
    """Finds the tasks of the installed applications, as the admin finds its classes: in their modules `tasks`."""

    name = "pgqueue.contrib.django"
    label = "pgqueue"
    verbose_name = "Job queue"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Django has loaded all models."""
        from pgqueue.contrib.django.checks import check_schema
        from pgqueue.contrib.django.databases import be_where_the_parent_is
        from pgqueue.contrib.django.models import refuse

        be_where_the_parent_is()  # where a module of the project has set Django up by itself
        checks.register(check_schema, checks.Tags.database)
        for model in self.get_models():
            pre_save.connect(refuse, sender=model, dispatch_uid=f"pgqueue.{model.__name__}")
        post_migrate.connect(_complete, sender=self, dispatch_uid="pgqueue.schema")
        autodiscover_modules("tasks")
        _collect()


def _collect() -> None:
    """Tasks of other backends too: `.using(backend=…)` may send them to ours."""
    if not options.our_aliases():
        return
    from pgqueue.contrib.django.framework import Task
    from pgqueue.contrib.django.framework_task import defined

    for config in apps.get_app_configs():
        module = sys.modules.get(f"{config.name}.tasks")
        for value in list(vars(module).values()) if module is not None and config.name != PgQueueConfig.name else []:
            if isinstance(value, Task):
                defined.add(value)


def _complete(sender: AppConfig, using: str, verbosity: int = 0, **kwargs: Any) -> None:
    """Where the settings switch migrations off, as test settings do for speed, the schema is made all the same. And what
    they named only after the migrations were recorded, another schema or database, is brought to where those are."""
    from django.db import connections
    from django.db.migrations.loader import MigrationLoader

    from pgqueue import migrate
    from pgqueue.contrib.django import revisions

    connection = connections[using]
    if MigrationLoader.migrations_module(sender.label)[0] is None:
        wanted = migrate.revisions()[-1]
    elif "plan" not in kwargs:
        return  # it is `flush` that says so
    elif not (wanted := revisions.recorded(connection)):
        return
    for schema in revisions.concerned(connection, sender.label):
        if revisions.is_behind(connection, schema, wanted):
            if verbosity:
                out: Any = kwargs.get("stdout", sys.stdout)
                out.write(f"  Bringing the queue's schema {schema!r} to revision {wanted}\n")
            revisions.bring_up(connection, schema, wanted)
