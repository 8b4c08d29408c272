"""Times as the application has them: aware, or naive in its own zone where USE_TZ is off."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.utils import timezone

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def as_aware(value: datetime | None) -> datetime | None:
    """With a zone, for the queue; a naive one is in the zone of the application."""
    return timezone.make_aware(value) if value is not None and timezone.is_naive(value) else value


def as_django(value: datetime | None) -> datetime | None:
    """For the application, from the queue."""
    if value is None:
        return None
    return value.astimezone(UTC) if settings.USE_TZ else timezone.make_naive(value)


def claimed_at(token: int) -> datetime:
    """When a job was claimed, by the database's clock: a token is made of these microseconds and nine bits more."""
    return _EPOCH + timedelta(microseconds=token >> 9)
