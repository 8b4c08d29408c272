"""docs/django.md is a project: its examples are the files that they name, and its tests run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import django

from tests.contrib.django.settings import database
from tests.contrib.django.test_command import ROOT, environment
from tests.integration.test_documentation import blocks

BESIDE = """
import django

DATABASES = {{"default": {database!r}}}
SECRET_KEY = "x"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""


def test_the_examples_of_the_page_on_django_are_a_project_whose_tests_pass(shop: str, tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "shop" / "settings.py").write_text(BESIDE.format(database=database(shop)))
    named = []
    for block in blocks(ROOT / "docs" / "django.md", "python"):
        name = block.splitlines()[0].removeprefix("# ")
        named.append(name)
        with (tmp_path / name).open("a") as file:
            file.write(block)
    assert sorted(set(named)) == [f"shop/{part}.py" for part in ("models", "orders", "settings", "tasks", "tests")]
    if django.VERSION < (6, 0):
        with (tmp_path / "shop" / "settings.py").open("a") as file:
            file.write('INSTALLED_APPS.append("django_tasks")\n')
    path = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "DJANGO_SETTINGS_MODULE": "shop.settings"}
    for words in (["check", "--fail-level", "WARNING"], ["test", "shop", "--noinput"]):
        done = subprocess.run(
            [sys.executable, "-m", "django", *words],
            cwd=tmp_path,
            env=environment(**path),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert "Ran 3 tests" in done.stderr
