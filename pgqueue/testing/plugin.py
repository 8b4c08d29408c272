"""The pytest plugin: fixtures, loaded by pytest itself where pgqueue is installed. The only module that imports pytest.

Heavy things are imported by the fixtures that need them: the plugin is loaded in every run, also of those who do not use it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from pgqueue.testing import leftovers

if TYPE_CHECKING:
    import psycopg

    from pgqueue.testing.calling import Ran
    from pgqueue.testing.clock import Clock

INI = "pgqueue_test_database_url"
VARIABLE = "PGQUEUE_TEST_DATABASE_URL"
CLOCK = "pgqueue_clock"
PATIENCE = 10.0
"""Seconds for the workers of pytest-xdist to leave."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of pytest's configuration file."""
    parser.addini(
        INI, f"a server on which pgqueue's fixtures may make databases; {VARIABLE} has precedence", default=""
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """The run is over, and its private server with it. Not before: the end of fixtures may be part of the end of the run."""
    if "PYTEST_XDIST_WORKER" not in os.environ and leftovers.server_folder().exists():
        leftovers.remove_server(PATIENCE if config.pluginmanager.hasplugin("dsession") else 0.0)


@pytest.fixture(scope="session")
def pgqueue_server_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """The URL of the server of this run: that of PGQUEUE_TEST_DATABASE_URL or of pgqueue_test_database_url in pytest's
    configuration, with a role that may create databases; else a private one (the extra `embedded`)."""
    from pgqueue.testing import databases

    given = os.environ.get(VARIABLE) or str(pytestconfig.getini(INI)) or None
    with databases.server(given) as url:
        yield url


@pytest.fixture(scope="session")
def pgqueue_prepare_template() -> Callable[[str], None]:
    """Override to make tables of yours: a function that is called once with the URL of the migrated template."""
    return lambda url: None


@pytest.fixture(scope="session")
def pgqueue_test_schema() -> str:
    """Override it where your queue object has another `schema`."""
    return "pgqueue"


@pytest.fixture(scope="session")
def pgqueue_template(
    pgqueue_server_url: str, pgqueue_prepare_template: Callable[[str], None], pgqueue_test_schema: str
) -> Iterator[str]:
    """The name of a migrated database, which nobody connects to."""
    from pgqueue.testing import databases

    with databases.database(pgqueue_server_url) as name:
        url = databases.url_of(pgqueue_server_url, name)
        databases.migrated(url, pgqueue_test_schema)
        pgqueue_prepare_template(url)
        databases.end_sessions(pgqueue_server_url, name)
        yield name


@pytest.fixture
def pgqueue_database(
    pgqueue_server_url: str, pgqueue_template: str, pgqueue_test_schema: str, request: pytest.FixtureRequest
) -> Iterator[str]:
    """The URL of a migrated database that belongs to this test alone: a clone of the template."""
    from pgqueue.testing import databases

    with databases.database(pgqueue_server_url, pgqueue_template) as name:
        url = databases.url_of(pgqueue_server_url, name)
        if CLOCK in request.fixturenames:
            _install(url, pgqueue_test_schema)
        yield url


@pytest.fixture(scope="session")
def pgqueue_shared_database(
    pgqueue_server_url: str, pgqueue_template: str, pgqueue_test_schema: str, request: pytest.FixtureRequest
) -> Iterator[str]:
    """The URL of a clone that all tests of this process share, each in a transaction of its own that is rolled back."""
    from pgqueue.testing import databases

    with databases.database(pgqueue_server_url, pgqueue_template) as name:
        url = databases.url_of(pgqueue_server_url, name)
        if any(CLOCK in getattr(item, "fixturenames", ()) for item in request.session.items):
            _install(url, pgqueue_test_schema)  # before the first session of a test is opened
        yield url


@pytest.fixture
def pgqueue_connection(pgqueue_shared_database: str) -> Iterator[psycopg.Connection[Any]]:
    """A psycopg connection in a transaction that is rolled back after the test. Override it with a connection or session of
    your own, of SQLAlchemy for example, that is rolled back as well."""
    from pgqueue.testing import databases

    with databases.rolled_back(pgqueue_shared_database) as connection:
        yield connection


@pytest.fixture
def pgqueue_app() -> Any:
    """Override it with the queue object of your application; a new PgQueue without it."""
    from pgqueue import PgQueue

    return PgQueue()


@pytest.fixture
def pgqueue_cloned(pgqueue_app: Any, pgqueue_database: str) -> Iterator[Any]:
    """The queue object of the application, pointed to a database of this test's own."""
    from pgqueue.testing.pointing import pointed

    with pointed(pgqueue_app, pgqueue_database) as queue:
        yield queue


@pytest.fixture
def pgqueue_rolled_back(pgqueue_app: Any, pgqueue_shared_database: str, pgqueue_connection: Any) -> Iterator[Any]:
    """The queue object of the application, with all that it does in the transaction of `pgqueue_connection`."""
    from pgqueue.testing.pointing import bound, check_bindable, pointed

    check_bindable(pgqueue_app, pgqueue_connection)
    with pointed(pgqueue_app, pgqueue_shared_database), bound(pgqueue_app, pgqueue_connection) as queue:
        yield queue


@pytest.fixture
def pgqueue_inline(pgqueue_app: Any) -> Iterator[list[Ran]]:
    """The queue object of the application in the inline mode: enqueues run their jobs at once; what ran."""
    from pgqueue.testing.inlining import inline

    with inline(pgqueue_app) as ran:
        yield ran


@pytest.fixture
def pgqueue_clock(request: pytest.FixtureRequest) -> Iterator[Clock]:
    """The clock of this test's database, whether that is `pgqueue_database` or the one of `pgqueue_connection`."""
    from pgqueue.testing.clock import Clock

    shared = {"pgqueue_connection", "pgqueue_rolled_back", "pgqueue_shared_database"} & set(request.fixturenames)
    own = {"pgqueue_database", "pgqueue_cloned"} & set(request.fixturenames)
    with ExitStack() as closing:
        clocks = []
        if shared:
            clocks.append(Clock(request.getfixturevalue("pgqueue_shared_database")))
        if own or not shared:
            clocks.append(Clock(request.getfixturevalue("pgqueue_database")))
        if len(clocks) > 1:
            pytest.fail(
                "pgqueue_clock: this test uses a clone and the shared database; which one is the clock to be of?"
            )
        [clock] = clocks
        closing.callback(clock.close)
        closing.callback(clock.reset)
        yield clock


def _install(url: str, schema: str) -> None:
    from pgqueue.testing.clock import install_clock

    install_clock(url, schema=schema)
