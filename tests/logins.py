"""Roles that log in with a password, for what SET ROLE would not show: the session itself belongs to them."""

from __future__ import annotations

import fcntl
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from tests.conftest import execute
from tests.waiting import wait_until

PASSWORD = "correct-horse-7"
GROUP = "pgqueue_test_logins"
RULE = f"local all +{GROUP} scram-sha-256\n"
PATIENCE = 30.0


def unique(stem: str) -> str:
    """A name that no other test uses: roles belong to the whole server."""
    return f"{stem}_{uuid.uuid4().hex[:10]}"


@contextmanager
def login(database: str, *groups: str, attributes: str = "") -> Iterator[str]:
    """The URL of a new role that is a member of these groups; gone, with all it owns, at the end of the block."""
    name = unique("pgqueue_login")
    already = "EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;"
    execute(database, f"DO $$ BEGIN CREATE ROLE {GROUP}; {already} END $$")
    member = f"IN ROLE {', '.join([GROUP, *groups])}"
    execute(database, f"CREATE ROLE {name} LOGIN {attributes} PASSWORD '{PASSWORD}' {member}")
    url = psycopg.conninfo.make_conninfo(database, user=name, password=PASSWORD)
    try:
        _admit(database, url)
        yield url
    finally:
        drop_roles(database, name)


@contextmanager
def roles_of_test(database: str) -> Iterator[str]:
    """A prefix for the three roles, which are dropped at the end of the block where they were made."""
    prefix = unique("roles")
    try:
        yield prefix
    finally:
        drop_roles(database, *(f"{prefix}_{kind}" for kind in ("worker", "producer", "reader")))


def drop_roles(database: str, *names: str) -> None:
    """With everything that they own or were granted in this database."""
    for name in names:
        if execute(database, "SELECT 1 FROM pg_roles WHERE rolname = %s", name):
            execute(database, f"DROP OWNED BY {name} CASCADE")
            execute(database, f"DROP ROLE {name}")


def _admit(database: str, url: str) -> None:
    """The embedded server lets in its own account only: a rule before its own makes it ask these roles for a password."""
    if _lets_in(url):
        return
    [(place,)] = execute(database, "SHOW hba_file")
    with Path(place).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # other processes of a parallel run do the same, on the same server
        rules = file.read()
        if RULE not in rules:
            file.seek(0)
            file.write(RULE + rules)
    execute(database, "SELECT pg_reload_conf()")
    wait_until(lambda: _lets_in(url), PATIENCE, "the server lets the new role in")


def _lets_in(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True
