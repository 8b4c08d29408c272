"""Of two uploads in a row only the newest is what the user sees: real workers, of which some are killed meanwhile."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.acceptance.command_line import CommandLine
from tests.waiting import wait_until
from tests.workers import count

APP = """
    import random
    import time

    import psycopg
    import pgqueue

    pq = pgqueue.PgQueue()


    @pq.task(queue="avatars", unique_key=lambda user_id, upload_id: f"avatar:{user_id}", on_conflict="supersede",
             max_attempts=50, retry=pgqueue.Fixed(0.05))
    def show_avatar(user_id, upload_id):
        job = pgqueue.current_job()
        with psycopg.connect(pq.settings.database_url, autocommit=True) as connection:
            connection.execute("INSERT INTO begun VALUES (%s, %s)", (user_id, upload_id))
            try:
                end = time.monotonic() + random.choice([0.0, 0.05, 0.3])
                while time.monotonic() < end and not job.superseded:
                    time.sleep(0.01)
                if job.superseded and random.random() < 0.5:
                    return  # a newer one is on its way
                if random.random() < 0.1:
                    raise ValueError("a picture that needs a second try")
                connection.execute(
                    "INSERT INTO avatar AS mine VALUES (%s, %s, %s) ON CONFLICT (user_id) DO UPDATE"
                    " SET upload_id = excluded.upload_id, token = excluded.token WHERE mine.token < excluded.token",
                    (user_id, upload_id, job.token))
                connection.execute("INSERT INTO seen (user_id, upload_id) VALUES (%s, %s)", (user_id, upload_id))
            finally:
                connection.execute("DELETE FROM begun WHERE user_id = %s", (user_id,))
"""
TABLES = """
    CREATE TABLE upload (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, user_id int NOT NULL);
    CREATE TABLE avatar (user_id int PRIMARY KEY, upload_id bigint NOT NULL, token bigint NOT NULL);
    CREATE TABLE seen (at bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, user_id int NOT NULL, upload_id bigint NOT NULL);
    CREATE TABLE begun (user_id int, upload_id bigint);
"""
USERS = 6


@pytest.fixture
def cli(tmp_path: Path, database: str, admin: psycopg.Connection[Any]) -> CommandLine:
    line = CommandLine(tmp_path, database)
    line.write("avatars_app.py", APP)
    admin.execute(TABLES.encode())
    return line


def test_of_many_uploads_in_a_row_only_the_newest_is_what_the_user_sees(
    cli: CommandLine, database: str, admin: psycopg.Connection[Any]
) -> None:
    pq = pgqueue.PgQueue(database)
    show = pq.task(
        name="avatars_app.show_avatar",
        queue="avatars",
        unique_key=lambda user_id, upload_id: f"avatar:{user_id}",
        on_conflict="supersede",
        max_attempts=50,
        retry=pgqueue.Fixed(0.05),
    )(lambda user_id, upload_id: None)
    choose = random.Random(7)
    newest: dict[int, int] = {}
    words = ("worker", "--app", "avatars_app", "--lease", "2", "--concurrency", "4")
    with cli.started(*words) as doomed, cli.started(*words) as steady, pq, psycopg.connect(database) as caller:
        for program in (doomed, steady):
            program.wait_for("started: queues")
        for number in range(120):
            user = choose.randrange(USERS)
            [(upload,)] = caller.execute("INSERT INTO upload (user_id) VALUES (%s) RETURNING id", [user]).fetchall()
            show.enqueue(user, upload, using=caller)
            if choose.random() < 0.15:
                caller.rollback()
            else:
                caller.commit()
                newest[user] = upload
            if number == 60:
                wait_until(lambda: count_begun(admin), 30, "something runs")
                doomed.signal(signal.SIGKILL)
        wait_until(lambda: count(admin, "job") == 0, 60, "all has run")
        assert steady.process.poll() is None
    shown = dict(admin.execute("SELECT user_id, upload_id FROM avatar").fetchall())
    assert shown == newest
    history: dict[int, list[int]] = {}
    for user, upload in admin.execute("SELECT user_id, upload_id FROM seen ORDER BY at").fetchall():
        history.setdefault(user, []).append(upload)
    assert all(uploads == sorted(uploads) for uploads in history.values()), "nobody ever saw an older one again"
    assert count(admin, "dead_letter") == 0


def count_begun(admin: psycopg.Connection[Any]) -> int:
    row = admin.execute("SELECT count(*) FROM begun").fetchone()
    return 0 if row is None else int(row[0])
