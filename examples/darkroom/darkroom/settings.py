"""The settings. What belongs to pgqueue is an application, and a backend for tasks."""

from __future__ import annotations

import os
from pathlib import Path

import django
from psycopg.conninfo import conninfo_to_dict

BASE = Path(__file__).resolve().parent
_database = conninfo_to_dict(os.environ.get("DATABASE_URL", "postgresql:///darkroom"))

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _database.get("dbname", ""),
        "USER": _database.get("user", ""),
        "PASSWORD": _database.get("password", ""),
        "HOST": _database.get("host", ""),
        "PORT": str(_database.get("port", "")),
        "ATOMIC_REQUESTS": True,  # a request and its jobs are committed together, or not at all
    }
}

TASKS = {
    "default": {
        "BACKEND": "pgqueue.contrib.django.PgQueueBackend",
        "QUEUES": ["default", "photographs"],
    }
}

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "pgqueue.contrib.django",
    "darkroom.gallery",
]
if django.VERSION < (6, 0):
    INSTALLED_APPS.append("django_tasks")

MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
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

ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
DATA_UPLOAD_MAX_MEMORY_SIZE = 64 * 2**20
DEBUG = os.environ.get("DEBUG", "") == "1"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "darkroom.urls"
SECRET_KEY = os.environ.get("SECRET_KEY", "for trying out on this machine, and nowhere else")
STATIC_URL = "static/"
USE_TZ = True
