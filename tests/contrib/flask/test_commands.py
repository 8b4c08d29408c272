"""`flask pgqueue …`: the same command line, on the queue of the application that `flask` has made."""

from __future__ import annotations

import json
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import flask
import psycopg
import pytest

from pgqueue.contrib.flask import PgQueue
from pgqueue.worker.processes import stop_signals
from tests.callers import sqlalchemy_url
from tests.contrib.album import PATIENCE, Running, command_line, environment, started
from tests.waiting import wait_until
from tests.workers import count, wait_for_count

Admin = psycopg.Connection[Any]
EXTENSIONS = """
    from pgqueue.contrib.flask import PgQueue

    pq = PgQueue()
"""
TASKS = """
    import os

    import flask

    from shop.extensions import pq


    def mark(text):
        with open("marks", "a") as file:
            file.write(f"{text} {flask.current_app.name} {flask.current_app.config['COLOUR']}\\n")


    @pq.task(queue="images")
    def note(text):
        mark(text)


    @pq.task(queue="images", isolation="process")
    def apart(text):
        mark(f"{text} {os.getppid()}")
        flask.g.ended = True
        note.enqueue(f"{text} again")


    @pq.task(queue="images", isolation="process")
    async def apart_async(text):
        mark(text)


    @pq.task(queue="images")
    def hang():
        import threading, time
        threading.Thread(target=time.sleep, args=(600,)).start()
        mark("hung")
"""
FACTORY = """
    import os

    import flask


    def create_app(colour="blue"):
        from shop.extensions import pq
        from shop import tasks

        app = flask.Flask("shop")
        app.config.update(COLOUR=colour, PGQUEUE_DATABASE_URL=os.environ.get("SHOP_DATABASE"))
        app.config["SQLALCHEMY_DATABASE_URI"] = os.environ.get("SHOP_SQLALCHEMY")

        @app.teardown_appcontext
        def note_end(error):
            if flask.g.get("ended"):
                tasks.mark("torn down")

        pq.init_app(app)
        return app
"""


WSGI = """
    from shop import create_app
    from shop.extensions import pq

    app = create_app("red")
"""


class Shop:
    """A package `shop` with a factory, in a folder where `flask` is run; the database is in its configuration."""

    def __init__(self, folder: Path, database: str) -> None:
        self.folder = folder
        self.env = environment(database, folder)
        self.env["SHOP_DATABASE"] = self.env.pop("PGQUEUE_DATABASE_URL")
        (folder / "shop").mkdir()
        files = {"__init__": FACTORY, "extensions": EXTENSIONS, "tasks": TASKS, "wsgi": WSGI}
        for name, text in files.items():
            (folder / "shop" / f"{name}.py").write_text(textwrap.dedent(text))

    def run(self, *words: str, app: str = "shop") -> tuple[int, str, str]:
        done = subprocess.run(
            command_line(["flask", "--app", app, "pgqueue", *words]),
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=PATIENCE * 2,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def good(self, *words: str) -> str:
        status, output, errors = self.run(*words)
        assert (status, errors) == (0, ""), (status, output, errors)
        return output

    @contextmanager
    def worker(self, *words: str, app: str = "shop") -> Iterator[Running]:
        command = ("flask", "--app", app, "pgqueue", "worker", *words)
        with started(command, self.env, self.folder) as program:
            yield program

    def marks(self) -> list[str]:
        file = self.folder / "marks"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def shop(tmp_path: Path, database: str) -> Shop:
    return Shop(tmp_path, database)


def test_the_commands_are_those_of_pgqueue_on_the_database_of_the_application(shop: Shop, admin: Admin) -> None:
    job_id = int(shop.good("enqueue", "shop.tasks.note", "--args", '["hello"]', "--priority", "5"))
    [job] = json.loads(shop.good("jobs", "--json"))
    assert (job["id"], job["queue"], job["priority"]) == (job_id, "images", 5)
    assert "up to date" in shop.good("migrate", "--check")
    status, output, _ = shop.run("migrate", "--check", "--schema", "nowhere")
    assert (status, "holds no queue yet: run `flask pgqueue migrate`" in output) == (1, True), output
    assert "Usage: flask pgqueue" in shop.good("--help")


def test_mistakes_get_the_same_sentences_and_statuses(shop: Shop) -> None:
    for words, status, said in (
        (("enqueue", "shop.tasks.noet"), 1, "similar: shop.tasks.note"),
        (("status", "--colour"), 2, "No such option"),
        (("worker", "--app", "shop"), 2, "leave out --app: `flask pgqueue` works on its own application"),
        (("status", "--schema", "nowhere"), 1, "run `flask pgqueue migrate`"),
        (("pause", "nowhere"), 1, "there is no queue 'nowhere'"),
        (("pause", "nowhere", "--force"), 0, ""),
    ):
        found, _, errors = shop.run(*words)
        assert (found, said in errors, "Traceback" in errors) == (status, True, False), (words, found, errors)


def test_a_worker_and_its_child_processes_push_the_context_of_the_application_that_flask_made(
    shop: Shop, admin: Admin
) -> None:
    for name in ("note", "apart", "apart_async"):
        shop.good("enqueue", f"shop.tasks.{name}", "--args", f'["{name}"]')
    with shop.worker("--drain", app="shop:create_app('red')") as worker:
        assert worker.process.wait(PATIENCE) == 0, worker.said
        pid = worker.process.pid
    marks = [
        f"apart {pid} shop red",
        "apart again shop red",
        "apart_async shop red",
        "note shop red",
        "torn down shop red",
    ]
    assert sorted(shop.marks()) == marks
    assert count(admin, "archive", "state = 'completed'") == 4


def test_processes_of_a_worker_run_the_same_application_on_the_database_of_the_command_line(
    shop: Shop, admin: Admin
) -> None:
    url = shop.env["SHOP_DATABASE"]
    shop.env["SHOP_DATABASE"] = "postgresql:///no_such_database_anywhere"
    with shop.worker("--processes", "2", "--database-url", url, app="shop:create_app('red')") as worker:
        wait_for_count(admin, 2, "worker")
        assert shop.run("enqueue", "shop.tasks.note", "--args", '["x"]', "--database-url", url)[0] == 0
        wait_until(lambda: shop.marks() == ["x shop red"], PATIENCE, f"the job has run:\n{worker.said}")
        assert worker.stop(signal.SIGTERM) == 0, worker.said
    assert count(admin, "worker") == 0


def test_the_program_pgqueue_runs_the_application_of_a_module_on_the_database_of_sqlalchemy(
    shop: Shop, admin: Admin
) -> None:
    url = shop.env.pop("SHOP_DATABASE")
    shop.env["SHOP_SQLALCHEMY"] = sqlalchemy_url(url).render_as_string(hide_password=False)
    for name in ("note", "apart"):
        words = ["pgqueue", "enqueue", "--app", "shop.wsgi:pq", f"shop.tasks.{name}", "--args", f'["{name}"]']
        done = subprocess.run(
            command_line(words), cwd=shop.folder, env=shop.env, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
    with started(("pgqueue", "worker", "--app", "shop.wsgi:pq", "--drain"), shop.env, shop.folder) as worker:
        assert worker.process.wait(PATIENCE) == 0, worker.said
        pid = worker.process.pid
    marks = [f"apart {pid} shop red", "apart again shop red", "note shop red", "torn down shop red"]
    assert sorted(shop.marks()) == marks
    assert count(admin, "archive", "state = 'completed'") == 3


def test_a_worker_leaves_although_a_thread_of_a_job_hangs(shop: Shop, admin: Admin) -> None:
    shop.good("enqueue", "shop.tasks.hang")
    with shop.worker("--drain") as worker:
        assert worker.process.wait(PATIENCE) == 0, worker.said
    assert shop.marks() == ["hung shop blue"]


def test_flasks_own_test_runner_gets_output_and_status(database: str, admin: Admin) -> None:
    app = flask.Flask("tested")
    app.config["PGQUEUE_DATABASE_URL"] = database
    pq = PgQueue(app)
    ran: list[str] = []

    @pq.task(name="note", queue="q")
    def note(text: str) -> None:
        ran.append(f"{text} {flask.current_app.name}")

    note.enqueue("hello")
    runner = app.test_cli_runner()
    done = runner.invoke(args=["pgqueue", "jobs", "--json"])
    assert (done.exit_code, json.loads(done.output)[0]["task"]) == (0, "note")
    assert runner.invoke(args=["pgqueue", "enqueue", "nothing"]).exit_code == 1
    handlers = [signal.getsignal(number) for number in stop_signals()]
    assert runner.invoke(args=["pgqueue", "worker", "--drain"]).exit_code == 0
    assert ran == ["hello tested"]
    assert [signal.getsignal(number) for number in stop_signals()] == handlers
    pq.close()


OWN_WORKER = """
    from pgqueue.worker import Worker, WorkerOptions
    from shop import create_app
    from shop.extensions import pq
    from shop.tasks import apart

    app = create_app("green")
    with app.app_context():
        apart.options(max_attempts=1).enqueue("apart")
    raise SystemExit(Worker(pq.for_app(app), WorkerOptions(drain=True)).run())
"""


@pytest.mark.parametrize("made_by", ["shop:create_app('green')", None])
def test_child_processes_of_a_worker_of_ones_own_have_the_application_of_the_environment(
    made_by: str | None, shop: Shop, admin: Admin
) -> None:
    (shop.folder / "own_worker.py").write_text(textwrap.dedent(OWN_WORKER))
    shop.env.pop("FLASK_APP", None)
    if made_by is not None:
        shop.env["FLASK_APP"] = made_by
    with started(("python", "own_worker.py"), shop.env, shop.folder) as worker:
        assert worker.process.wait(PATIENCE) == 0, worker.said
        pid = worker.process.pid
    if made_by is not None:
        assert sorted(shop.marks()) == [f"apart {pid} shop green", "apart again shop green", "torn down shop green"]
        assert count(admin, "archive", "state = 'completed'") == 2
        return
    said = "start the worker with `flask --app … pgqueue worker`, or set FLASK_APP"
    assert count(admin, "dead_letter", f"reason LIKE '%{said}%'") == 1, admin.execute(
        "SELECT reason FROM pgqueue.dead_letter"
    ).fetchall()


TWO_APPS = """
    from pgqueue.worker import Worker, WorkerOptions
    from shop import create_app
    from shop.extensions import pq
    from shop.tasks import apart

    one, two = create_app("one"), create_app("two")

    if __name__ == "__main__":
        with one.app_context():
            apart.enqueue("apart")
        raise SystemExit(Worker(pq.for_app(one), WorkerOptions(drain=True)).run())
"""


def test_the_environment_chooses_where_a_child_process_has_several_applications(shop: Shop, admin: Admin) -> None:
    (shop.folder / "two_apps.py").write_text(textwrap.dedent(TWO_APPS))
    shop.env["FLASK_APP"] = "two_apps:one"
    with started(("python", "two_apps.py"), shop.env, shop.folder) as worker:
        assert worker.process.wait(PATIENCE) == 0, worker.said
        pid = worker.process.pid
    assert sorted(shop.marks()) == [f"apart {pid} shop one", "apart again shop one", "torn down shop one"]
    assert count(admin, "archive", "state = 'completed'") == 2
