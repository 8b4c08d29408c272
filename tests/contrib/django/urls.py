"""The pages of the project."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from tests.contrib.django.shop import views

urlpatterns = [
    path("admin/", admin.site.urls),
    path("order/<int:number>/", views.order),
    path("broken/<int:number>/", views.broken),
]
