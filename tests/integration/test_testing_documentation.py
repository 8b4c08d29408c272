"""docs/testing.md is a project, or several: its blocks are the files that they name, and their tests run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import django
import pytest

from pgqueue import migrate
from tests.callers import django_connection
from tests.integration.test_documentation import ROOT, blocks

SETTINGS = """
INSTALLED_APPS = ["pgqueue.contrib.django", "shop", {framework}]
TASKS = {{"default": {{"BACKEND": "pgqueue.contrib.django.PgQueueBackend", "QUEUES": []}}}}
"""
SETTINGS_BESIDE = """
DATABASES = {{"default": {database!r}}}
SECRET_KEY = "x"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""
OF_DJANGO = ("shop/models.py", "shop/orders.py", "shop/tasks.py")
"""Of the page on Django, which the one on tests builds on."""


def files(page: str, *names: str) -> dict[str, str]:
    """The blocks of a page by the file that their first line names; all, or these."""
    found: dict[str, str] = {}
    for block in blocks(ROOT / "docs" / page, "python"):
        name = block.splitlines()[0].removeprefix("# ")
        if not names or name in names:
            found[name] = found.get(name, "") + block
    return found


def run(words: list[str], folder: Path, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "DJANGO_"))}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_examples_of_the_page_on_tests_pass(server_url: str, tmp_path: Path) -> None:
    found = {name: text for name, text in files("testing.md").items() if "/" not in name}
    assert sorted(found) == ["conftest.py", "shop.py", "test_fastapi_shop.py", "test_flask_shop.py", "test_shop.py"]
    for name, text in found.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", encoding="utf-8")
    words = ["pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio"]
    assert "10 passed" in run(words, tmp_path, PGQUEUE_TEST_DATABASE_URL=server_url)


@pytest.mark.skipif(
    not any((ROOT / "pgqueue/contrib/django/migrations").glob(f"{migrate.heads()[0][:4]}*.py")),
    reason="Django's migrations end before the newest revision: see tests/contrib/django/test_migrations.py",
)
def test_the_example_of_a_test_case_of_django_passes(database: str, tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    for name, text in {**files("django.md", *OF_DJANGO), **files("testing.md", "shop/tests.py")}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    connected = django_connection(database).settings_dict
    entry = {name: connected[name] for name in ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")}
    framework = '"django_tasks"' if django.VERSION < (6, 0) else ""
    settings = SETTINGS.format(framework=framework) + SETTINGS_BESIDE.format(database=entry)
    (tmp_path / "shop" / "settings.py").write_text(settings, encoding="utf-8")
    said = run(["django", "test", "shop", "--noinput"], tmp_path, DJANGO_SETTINGS_MODULE="shop.settings")
    assert "Ran 1 test" in said
