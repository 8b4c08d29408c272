"""A Django project like any other. Where its database is, says the environment or a fixture."""

from __future__ import annotations

import os
from typing import Any

import django
from psycopg.conninfo import conninfo_to_dict

_FRAMEWORK = "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
BACKEND = "pgqueue.contrib.django.PgQueueBackend"


def database(url: str) -> dict[str, Any]:
    """The entry of DATABASES for a URL."""
    parts = conninfo_to_dict(url)
    names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
    return {
        "ENGINE": "django.db.backends.postgresql",
        **{name: str(parts.get(part) or "") for name, part in names.items()},
    }


_url = os.environ.get("SHOP_DATABASE", "dbname=nowhere")
_other = os.environ.get("SHOP_OTHER_DATABASE", "dbname=nowhere")
DATABASES = {"default": database(_url), "other": database(_other)}
TASKS: dict[str, Any] = {
    "default": {"BACKEND": BACKEND, "QUEUES": []},
    "strict": {"BACKEND": BACKEND, "QUEUES": ["default", "mail"], "OPTIONS": {"defaults": {"max_attempts": 1}}},
    "immediate": {"BACKEND": f"{_FRAMEWORK}.backends.immediate.ImmediateBackend"},
}  # fmt: skip
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "pgqueue.contrib.django",
    "tests.contrib.django.shop",
]
if django.VERSION < (6, 0):
    INSTALLED_APPS.append("django_tasks")
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
ALLOWED_HOSTS = ["*"]
DEBUG = bool(os.environ.get("SHOP_DEBUG"))
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
ROOT_URLCONF = "tests.contrib.django.urls"
SECRET_KEY = "not a secret: this project serves nobody"
STATIC_URL = "static/"
USE_TZ = True
