"""The tests of an application, run as its author runs them: manage.py test, in several processes too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.contrib.django.test_command import MANAGE, environment

SHOP = "tests.contrib.django.shop"


@pytest.mark.parametrize(
    ("cases", "number", "processes"),
    [("runner_cases", 10, 1), ("runner_cases", 10, 2), ("runner_serialized", 2, 1)],
)
def test_the_tests_of_an_application_pass_and_leave_no_database(
    cases: str, number: int, processes: int, shop: str, tmp_path: Path
) -> None:
    words = ["test", f"{SHOP}.{cases}", "--parallel", str(processes), "--noinput"]
    done = subprocess.run(
        [sys.executable, str(MANAGE), *words],
        cwd=tmp_path,
        env=environment(SHOP_DATABASE=shop, SHOP_OTHER_DATABASE=other(shop)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(rf"Ran {number} tests", done.stderr), done.stderr
    with psycopg.connect(shop) as connection:
        name = connection.info.dbname
        left = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE %s", (f"test\\_{name}%",))
        assert left.fetchall() == []


def other(url: str) -> str:
    """A name that the runner puts `test_` before as well."""
    parts: dict[str, Any] = psycopg.conninfo.conninfo_to_dict(url)
    return psycopg.conninfo.make_conninfo(**{**parts, "dbname": f"{parts['dbname']}_o"})
