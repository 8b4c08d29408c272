"""Photographs in the admin, beside pgqueue's own pages."""

from __future__ import annotations

from django.contrib import admin

from darkroom.gallery.models import Photograph


@admin.register(Photograph)
class PhotographAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Without the pictures."""

    list_display = ("name", "job", "uploaded_at")
    fields = readonly_fields = ("name", "job", "fence", "uploaded_at")
