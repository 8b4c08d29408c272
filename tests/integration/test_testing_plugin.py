"""The pytest plugin, in runs of pytest of its own: fixtures, both ways of cleaning up, xdist, the configuration."""

from __future__ import annotations

import os
from pathlib import Path

import psycopg
import pytest

from tests.integration.test_documentation import ROOT, blocks

pytest_plugins = ["pytester"]

APPLICATION = """
import pgqueue
from pgqueue.testing import *

pq = pgqueue.PgQueue("postgresql://production@/never")
done = []

@pq.task(queue="mail", name="send")
def send(to, then=None):
    done.append(to)
    if then:
        send.enqueue(then)
"""
CONFTEST = """
import pytest, shop

@pytest.fixture
def pgqueue_app():
    shop.done.clear()
    return shop.pq
"""
TESTS = """
import pytest, shop
from pgqueue.testing import assert_enqueued, enqueued_jobs, run_jobs

@pytest.mark.parametrize("time", range(3))
def test_in_a_clone(pgqueue_cloned, time):
    assert pgqueue_cloned is shop.pq
    assert pgqueue_cloned.jobs() == []
    shop.send.enqueue("ada", then="bob")
    assert_enqueued(shop.send, "ada", kwargs={"then": "bob"})
    assert [ran.args for ran in run_jobs(shop.pq)] == [["ada"], ["bob"]]
    shop.send.enqueue("left behind")

@pytest.mark.parametrize("time", range(3))
def test_rolled_back(pgqueue_rolled_back, pgqueue_connection, time):
    assert enqueued_jobs(shop.pq) == []
    pgqueue_connection.execute("CREATE TABLE letter (id int)")
    shop.send.enqueue("ada", then="bob")
    assert len(run_jobs(shop.pq)) == 2
    assert shop.done == ["ada", "bob"]
    shop.send.enqueue("left behind")

def test_inline(pgqueue_inline):
    shop.send.enqueue("ada", then="bob")
    assert shop.done == ["ada", "bob"] and len(pgqueue_inline) == 2

@pytest.mark.parametrize("time", range(2))
def test_the_clock_of_a_clone(pgqueue_cloned, pgqueue_clock, time):
    pgqueue_clock.freeze()
    shop.send.options(delay=3600).enqueue("ada")
    assert run_jobs(shop.pq) == []
    pgqueue_clock.move(hours=1)
    assert len(run_jobs(shop.pq)) == 1

@pytest.mark.parametrize("time", range(2))
def test_the_clock_of_the_shared_database(pgqueue_clock, pgqueue_rolled_back, time):
    from datetime import UTC, datetime
    assert abs((pgqueue_clock.now() - datetime.now(UTC)).total_seconds()) < 60
    pgqueue_clock.freeze()
    shop.send.options(delay=3600).enqueue("ada")
    assert run_jobs(shop.pq) == []
    pgqueue_clock.move(hours=1)
    assert len(run_jobs(shop.pq)) == 1

def test_afterwards_it_is_where_it_was():
    assert shop.pq.settings.database_url == "postgresql://production@/never"
    assert "run" not in vars(shop.pq)
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    pytester.makepyfile(shop=APPLICATION, test_shop=TESTS)
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nfilterwarnings = error\naddopts = -p no:cacheprovider -p no:asyncio\npythonpath = .\n")
    for name in list(os.environ):
        if name.startswith("PYTEST_"):
            monkeypatch.delenv(name)
    return pytester


def databases(server_url: str) -> list[str]:
    with psycopg.connect(server_url) as connection:
        rows = connection.execute("SELECT datname FROM pg_database WHERE datname ~ '^pgqueue_test_[0-9a-f]{16}$'")
        return sorted(row[0] for row in rows)


def test_fixtures_on_a_given_server_leave_nothing_behind(
    project: pytest.Pytester, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGQUEUE_TEST_DATABASE_URL", server_url)
    result = project.runpytest_subprocess("-q")
    result.assert_outcomes(passed=12)
    assert databases(server_url) == []


@pytest.mark.slow
def test_the_server_may_be_named_in_the_configuration_and_xdist_shares_it(
    project: pytest.Pytester, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGQUEUE_TEST_DATABASE_URL", raising=False)
    with Path(project.path / "tox.ini").open("a", encoding="utf-8") as ini:
        ini.write(f"pgqueue_test_database_url = {server_url}\n")
    result = project.runpytest_subprocess("-q", "-n", "2")
    result.assert_outcomes(passed=12)
    assert databases(server_url) == []


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [[], ["-n", "2"]], ids=["one process", "xdist"])
def test_without_a_given_server_a_private_one_is_started_and_removed(
    parallel: list[str], project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGQUEUE_TEST_DATABASE_URL", raising=False)
    folder = project.mkdir("tmp")
    monkeypatch.setenv("TMPDIR", str(folder))
    result = project.runpytest_subprocess("-q", *parallel)
    result.assert_outcomes(passed=12)
    assert list(folder.glob("pgqueue-testing-*")) == []


def test_tables_of_the_application_are_made_once_in_the_template(
    project: pytest.Pytester, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGQUEUE_TEST_DATABASE_URL", server_url)
    project.makepyfile(
        test_shop="""
        import psycopg, pytest, shop

        @pytest.fixture(scope="session")
        def pgqueue_prepare_template():
            def prepare(url):
                with psycopg.connect(url) as connection:
                    connection.execute("CREATE TABLE letter (word text)")
            return prepare

        def test_in_a_clone(pgqueue_database):
            with psycopg.connect(pgqueue_database) as connection:
                connection.execute("INSERT INTO letter VALUES ('a')")

        @pytest.mark.parametrize("time", range(2))
        def test_rolled_back(pgqueue_rolled_back, pgqueue_connection, time):
            pgqueue_connection.execute("INSERT INTO letter VALUES ('a')")
            assert pgqueue_connection.execute("SELECT count(*) FROM letter").fetchone() == (1,)

        def test_there_is_one_clock(pgqueue_clock, pgqueue_database, pgqueue_connection):
            pass
        """
    )
    result = project.runpytest_subprocess("-q")
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*which one is the clock to be of?*"])


def test_the_connection_may_be_one_of_sqlalchemy(
    project: pytest.Pytester, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGQUEUE_TEST_DATABASE_URL", server_url)
    project.makepyfile(
        test_shop="""
        import psycopg, pytest, shop, sqlalchemy
        from sqlalchemy import orm
        from pgqueue.testing import assert_enqueued, run_jobs

        @pytest.fixture
        def pgqueue_connection(pgqueue_shared_database):
            engine = sqlalchemy.create_engine(
                "postgresql+psycopg://", creator=lambda: psycopg.connect(pgqueue_shared_database)
            )
            with engine.connect() as connection, connection.begin() as transaction:
                yield connection
                transaction.rollback()
            engine.dispose()

        @pytest.fixture
        def session(pgqueue_connection):
            with orm.Session(pgqueue_connection, join_transaction_mode="create_savepoint") as session:
                yield session

        @pytest.mark.parametrize("time", range(2))
        def test_a_session_that_commits(pgqueue_rolled_back, session, pgqueue_clock, time):
            assert shop.pq.jobs() == []
            pgqueue_clock.freeze()
            shop.send.options(delay=60).enqueue("ada", using=session)
            session.commit()
            assert_enqueued(shop.send, "ada")
            pgqueue_clock.move(minutes=1)
            assert len(run_jobs(shop.pq)) == 1
            shop.send.enqueue("left behind")
            pgqueue_clock.move(days=1)
        """
    )
    project.runpytest_subprocess("-q").assert_outcomes(passed=2)


TEMPLATE = """
import psycopg, pytest, shop

left = []

@pytest.fixture(scope="session")
def pgqueue_prepare_template():
    def prepare(url):
        left.append(psycopg.connect(url, autocommit={}))
        left[0].execute("CREATE TABLE letter (word text)")
    yield prepare
    left[0].close()

def test_in_a_clone(pgqueue_database):
    with psycopg.connect(pgqueue_database) as connection:
        connection.execute("INSERT INTO letter VALUES ('a')")
"""


def test_sessions_that_are_left_open_in_the_template_are_ended(
    project: pytest.Pytester, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGQUEUE_TEST_DATABASE_URL", server_url)
    project.makepyfile(test_shop=TEMPLATE.format(True))
    project.runpytest_subprocess("-q").assert_outcomes(passed=1)
    project.makepyfile(test_shop=TEMPLATE.format(False))
    result = project.runpytest_subprocess("-q")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*ConfigurationError: pgqueue_prepare_template left a transaction open*"])
    assert databases(server_url) == []


def test_an_application_that_is_none_is_said(
    project: pytest.Pytester, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGQUEUE_TEST_DATABASE_URL", server_url)
    project.makeconftest(CONFTEST.replace("return shop.pq", "shop.pq"))
    project.makepyfile(
        test_shop="""
        import pytest

        @pytest.mark.parametrize("name", ["pgqueue_rolled_back", "pgqueue_cloned", "pgqueue_inline"])
        def test_one(request, name):
            with pytest.raises(Exception, match="got None: does the fixture pgqueue_app return it") as caught:
                request.getfixturevalue(name)
            assert type(caught.value).__name__ == "ConfigurationError"
        """
    )
    project.runpytest_subprocess("-q").assert_outcomes(passed=3)


def test_an_async_queue_is_rolled_back_on_an_async_connection(
    project: pytest.Pytester, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGQUEUE_TEST_DATABASE_URL", server_url)
    project.makeini(
        "[pytest]\nfilterwarnings = error\naddopts = -p no:cacheprovider\npythonpath = .\nasyncio_mode = auto\n"
        "asyncio_default_fixture_loop_scope = function\n"
    )
    found = {
        block.splitlines()[0].removeprefix("# tests_async/"): block
        for block in blocks(ROOT / "docs" / "testing.md", "python")
        if block.startswith("# tests_async/")
    }
    assert sorted(found) == ["conftest.py", "test_uploads.py"]
    for name, text in found.items():
        (project.path / name).write_text(text, encoding="utf-8")
    (project.path / "uploads.py").write_text(
        """
import pgqueue

queue = pgqueue.AsyncPgQueue()

@queue.task
async def make_thumbnail(upload): ...
""",
        encoding="utf-8",
    )
    (project.path / "test_shop.py").unlink()
    project.runpytest_subprocess("-q").assert_outcomes(passed=1)
    (project.path / "conftest.py").write_text(
        "import pytest, uploads\n\n@pytest.fixture\ndef pgqueue_app():\n    return uploads.queue\n", encoding="utf-8"
    )
    result = project.runpytest_subprocess("-q")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*ConfigurationError: pgqueue_app is an AsyncPgQueue*override pgqueue_connection*"])


@pytest.mark.parametrize("parallel", [[], ["-n", "1"]], ids=["one process", "xdist"])
def test_the_plugin_is_light_where_nobody_uses_it(project: pytest.Pytester, parallel: list[str]) -> None:
    project.makeconftest(
        """
        import sys

        HEAVY = {"psycopg", "psycopg_pool", "alembic", "sqlalchemy", "django", "typer"}
        OURS = {"pgqueue", "pgqueue.testing", "pgqueue.testing.leftovers", "pgqueue.testing.plugin"}

        def loaded():
            ours = {name for name in sys.modules if name.split(".")[0] == "pgqueue"}
            return (HEAVY & set(sys.modules)) | (ours - OURS)

        def pytest_unconfigure(config):
            import atexit
            atexit.register(lambda: print("at the end:", loaded() or "nothing"))
        """
    )
    project.makepyfile(
        test_shop="""
        import sys
        from conftest import loaded

        def test_nothing_heavy_is_imported():
            assert "pgqueue.testing.plugin" in sys.modules
            assert not loaded()
        """
    )
    (project.path / "shop.py").unlink()
    result = project.runpytest_subprocess("-q", *parallel)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["at the end: nothing"])


def test_a_psycopg_that_cannot_be_imported_breaks_nobody_elses_tests(project: pytest.Pytester) -> None:
    (project.path / "psycopg.py").write_text("raise ImportError('no pq wrapper available')", encoding="utf-8")
    project.makepyfile(test_shop="def test_one():\n    pass\n")
    (project.path / "shop.py").unlink()
    (project.path / "conftest.py").unlink()
    result = project.runpytest_subprocess("-q")
    result.assert_outcomes(passed=1)
    project.makepyfile(test_shop="def test_one(pgqueue_rolled_back):\n    pass\n")
    result = project.runpytest_subprocess("-q")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*no pq wrapper available*"])
