"""The pages."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from darkroom.gallery import views

urlpatterns = [
    path("", views.wall, name="wall"),
    path("state/", views.state, name="state"),
    path("upload/", views.upload, name="upload"),
    path("print/<int:pk>/", views.show, name="print"),
    path("admin/", admin.site.urls),
]
