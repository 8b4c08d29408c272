"""The package loads its names when they are asked for, and has the same ones as before that."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pgqueue
import pgqueue.api
import pgqueue.testing


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("package", [pgqueue, pgqueue.testing])
def test_every_name_is_there_and_no_other(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert set(names) <= set(dir(package))
    for name in names:
        assert getattr(package, name) is getattr(package, name) is not None
    for name in ("nothing", "__nothing__"):
        assert not hasattr(package, name)
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(package, name)


def test_importing_it_loads_nothing() -> None:
    counted = "sorted(name for name in sys.modules if name.startswith(('pgqueue', 'psycopg')))"
    assert run(f"import pgqueue, sys; print({counted})") == "['pgqueue']"
    assert run(f"import pgqueue.testing, sys; print({counted})") == "['pgqueue', 'pgqueue.testing']"


@pytest.mark.parametrize(
    "code",
    [
        "import pgqueue; pgqueue.PgQueue; pgqueue.__version__",
        "import pgqueue; pgqueue.errors.LeaseLost; pgqueue.sql",
        "from pgqueue import *; PgQueue; __version__",
        "from pgqueue import PgQueue, __version__, errors, migrate",
        "from pgqueue.testing import *; inline(None, limit=1)",
        "import pgqueue.testing.inlining; from pgqueue.testing import inline; inline(None, limit=1)",
    ],
)
def test_all_ways_to_ask(code: str) -> None:
    run(code)


def test_every_module_can_be_the_first() -> None:
    for name in (
        "core",
        "client",
        "async_client",
        "batch",
        "worker",
        "ops.schedule",
        "contrib.flask",
        "testing.running",
    ):
        run(f"import pgqueue.{name}")
