"""For mypy's plugin: the models of the shop, and those of the example."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.contrib.django import settings
from tests.contrib.django.settings import *  # noqa: F403 - settings are the names of a module

sys.path.append(str(Path(__file__).parents[3] / "examples" / "darkroom"))
INSTALLED_APPS = [*settings.INSTALLED_APPS, "darkroom.gallery"]
