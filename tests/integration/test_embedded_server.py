"""A private PostgreSQL, started, shared, stopped, and killed at every moment that matters."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
import sqlalchemy

from pgqueue.embedded import Server, find_binaries, start
from pgqueue.embedded.cluster import shut_server_down
from pgqueue.embedded.folder import Folder
from pgqueue.embedded.locks import Lock, is_free
from pgqueue.errors import EmbeddedError

USER = """
import sys
from pgqueue.embedded import start
with start(sys.argv[1]) as server:
    print("started" if server.started else "joined", flush=True)
    sys.stdin.read()
"""

FORKED = """
import os, sys
from pgqueue.embedded import start
import psycopg
server = start(sys.argv[1])
if os.fork() == 0:
    if sys.argv[2] == "stop":
        server.stop()
    sys.exit()
os.wait()
with psycopg.connect(server.url) as connection:
    print(connection.execute("select 'lives'").fetchone()[0])
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A path for a private PostgreSQL, which is ended after the test whatever the test did to it."""
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
    assert not folder.sockets.exists()


class User:
    """Another process that uses the private PostgreSQL of `place`; `begun` is "started" or "joined"."""

    def __init__(self, place: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begun(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def leave(self) -> None:
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)


@pytest.fixture
def user(place: Path) -> Iterator[Callable[[], User]]:
    users: list[User] = []

    def begin() -> User:
        users.append(User(place))
        return users[-1]

    yield begin
    for one in users:
        one.kill()


def ask(server: Server, question: str) -> object:
    with psycopg.connect(server.url) as connection:
        row = connection.execute(question).fetchone()
    assert row is not None
    return row[0]


def runs(place: Path) -> bool:
    return not is_free(Folder(place).alive)


def postmaster(server: Server) -> int:
    return int((server.data / "postmaster.pid").read_text().split()[0])


def kill_postmaster(server: Server) -> None:
    os.kill(postmaster(server), signal.SIGKILL)


def test_it_starts_serves_stops_and_keeps_the_data(place: Path) -> None:
    with start(place) as server:
        assert server.started
        assert server.data == place / "data"
        assert str(ask(server, "show server_version")).split()[0] == server.version
        with psycopg.connect(server.url) as connection:
            connection.execute("create table kept as select 42 as answer")
    assert not runs(place)
    server.stop()
    with start(place) as server:
        assert server.started
        assert ask(server, "select answer from kept") == 42


def test_the_url_suits_psycopg_sqlalchemy_and_asyncpg(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPORT", "1")
    with start(place) as server:
        assert ask(server, "select current_database()") == "postgres"
        engine = sqlalchemy.create_engine(server.url.replace("postgresql:", "postgresql+psycopg:"))
        with engine.connect() as connection:
            assert connection.scalar(sqlalchemy.text("select current_user")) == "postgres"
        engine.dispose()
        asyncpg = pytest.importorskip("asyncpg")

        async def fetch() -> object:
            connection = await asyncpg.connect(server.url)
            try:
                return await connection.fetchval("select 1")
            finally:
                await connection.close()

        assert asyncio.run(fetch()) == 1


def test_another_database_has_its_url(place: Path) -> None:
    with start(place) as server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute('create database "büro 1"')
        with psycopg.connect(server.url_for("büro 1")) as connection:
            assert connection.info.dbname == "büro 1"


def test_what_is_written_is_safe_and_nothing_listens_on_tcp(place: Path) -> None:
    with start(place, options=["-c", "listen_addresses=127.0.0.1", "-c", "work_mem=7MB"]) as server:
        for setting, value in {
            "fsync": "on",
            "data_checksums": "on",
            "listen_addresses": "",
            "server_encoding": "UTF8",
            "work_mem": "7MB",
        }.items():
            assert (setting, ask(server, f"show {setting}")) == (setting, value)
        assert server.data.stat().st_mode & 0o077 == 0
        assert Folder(place).sockets.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["with space", "größe-数据", "$HOME `id` \"quoted\" 'too' ;,%41", "long" * 50])
def test_a_folder_may_have_any_name(place: Path, name: str) -> None:
    folder = place / name
    with start(folder) as server:
        assert ask(server, "show data_directory") == str(folder / "data")


def test_a_link_leads_to_the_same_server(place: Path) -> None:
    place.mkdir()
    (place / "link").symlink_to(place / "real")
    with start(place / "real"), start(place / "link") as second:
        assert not second.started


def test_without_a_path_the_environment_decides(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGQUEUE_DATA_DIR", str(place))
    with start() as server:
        assert server.data == place / "data"


def test_two_uses_in_one_process_end_one_by_one(place: Path) -> None:
    first, second = start(place), start(place)
    assert (first.started, second.started) == (True, False)
    first.stop()
    first.stop()
    assert ask(second, "select 1") == 1
    second.stop()
    assert not runs(place)


def test_threads_that_start_at_once_share_one_server(place: Path) -> None:
    servers: list[Server] = []
    threads = [threading.Thread(target=lambda: servers.append(start(place))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(server.started for server in servers) == [False, False, False, True]
    for server in servers:
        server.stop()
    assert not runs(place)


def test_processes_that_start_at_once_share_one_server_until_the_last_one_leaves(
    place: Path, user: Callable[[], User]
) -> None:
    users = [user() for _ in range(3)]
    assert sorted(one.begun() for one in users) == ["joined", "joined", "started"]
    users[0].leave()
    users[1].leave()
    assert runs(place)
    users[2].leave()
    assert not runs(place)


def test_a_server_whose_only_user_was_killed_is_joined_and_then_stopped(place: Path, user: Callable[[], User]) -> None:
    first = user()
    assert first.begun() == "started"
    first.kill()
    assert runs(place)
    with start(place) as server:
        assert not server.started
    assert not runs(place)


def test_a_killed_user_does_not_keep_the_server_from_being_stopped(place: Path, user: Callable[[], User]) -> None:
    killed = user()
    assert killed.begun() == "started"
    with start(place):
        killed.kill()
    assert not runs(place)


def test_a_process_that_forgets_to_stop_stops_at_its_end(place: Path) -> None:
    program = "import sys, pgqueue.embedded; pgqueue.embedded.start(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(place)], check=True, timeout=60)
    assert not runs(place)


@pytest.mark.parametrize("action", ["exit", "stop"])
def test_a_forked_child_does_not_stop_the_server_of_its_parent(place: Path, action: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(place), action], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "lives\n"
    assert not runs(place)


def test_a_killed_postmaster_is_replaced(place: Path) -> None:
    with start(place) as first:
        with psycopg.connect(first.url) as connection:
            connection.execute("create table kept as select 42 as answer")
        kill_postmaster(first)
        with start(place) as second:
            assert second.started
            assert ask(first, "select answer from kept") == 42
        assert ask(first, "select 1") == 1
    assert not runs(place)


def test_a_server_that_is_slow_to_go_is_signalled_once_and_nobody_else_is(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    kill = os.kill
    server = start(place)
    pid = postmaster(server)
    # One process of the server outlives the file that names the server: this descriptor stands for it.
    remains = Lock(Folder(place).alive)

    def kill_and_remain(target: int, number: int) -> None:
        sent.append(target)
        if target == pid:
            kill(target, number)
            remains.acquire()
            threading.Timer(0.3, remains.release).start()

    monkeypatch.setattr(os, "kill", kill_and_remain)
    server.stop()
    assert sent == [pid]
    assert not runs(place)


def test_a_killed_postmaster_can_be_stopped(place: Path) -> None:
    with start(place) as server:
        kill_postmaster(server)
    assert not runs(place)


@pytest.mark.parametrize("content", ["", "12", "not a number\n", "{own}\n/elsewhere\n1\n5432\n", None])
def test_a_stale_pid_file_does_not_matter(place: Path, content: str | None) -> None:
    with start(place) as server:
        stale = (server.data / "postmaster.pid").read_text() if content is None else content
    # The pid of this process stands for one that was given to somebody else after the crash.
    (server.data / "postmaster.pid").write_text(stale.replace("{own}", str(os.getpid())))
    with start(place) as server:
        assert server.started
        assert ask(server, "select 1") == 1


def test_what_a_killed_start_left_half_made_is_made_anew(place: Path) -> None:
    (place / "data.unfinished" / "base").mkdir(parents=True)
    (place / "data.unfinished" / "PG_VERSION").write_text("")
    with start(place) as server:
        assert ask(server, "select 1") == 1
    assert not (place / "data.unfinished").exists()


def test_a_deleted_folder_does_not_disturb_the_end(place: Path) -> None:
    with start(place) as server:
        pid = postmaster(server)
        shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGQUIT)
    shutil.rmtree(Folder(place).sockets, ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)


def test_a_leftover_socket_folder_is_not_adopted(place: Path) -> None:
    sockets = Folder(place).sockets
    sockets.mkdir(mode=0o777)
    (sockets / "trap").write_text("")
    with start(place) as server:
        assert ask(server, "select 1") == 1
        assert not (sockets / "trap").exists()
