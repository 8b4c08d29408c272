"""The application, for INSTALLED_APPS."""

from __future__ import annotations

import sys
from typing import Any

from django.apps import AppConfig, apps
from django.core import checks
from django.db.models.signals import post_migrate
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

        checks.register(check_schema, checks.Tags.database)
        post_migrate.connect(_without_migrations, sender=self, dispatch_uid="pgqueue.schema")
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


def _without_migrations(sender: AppConfig, using: str, **_kwargs: Any) -> None:
    """Where the settings switch migrations off, as test settings do for speed, the schema is made all the same."""
    from django.db import connections
    from django.db.migrations.loader import MigrationLoader

    from pgqueue import migrate
    from pgqueue.contrib.django import revisions

    if MigrationLoader.migrations_module(sender.label)[0] is not None:
        return
    for schema in revisions.concerned(connections[using], sender.label):
        revisions.bring_up(connections[using], schema, migrate.revisions()[-1])
