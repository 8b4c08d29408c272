"""Middleware and headers: wrapped around enqueues and runs, and never able to lose a job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.acceptance.command_line import CommandLine
from tests.workers import PATIENCE, count, define, running, wait_for_count

Admin = psycopg.Connection[Any]
tenant: ContextVar[Any] = ContextVar("tenant")


class Both(pgqueue.Middleware):
    """One that does the same around both colours."""

    def run(self, job: pgqueue.CurrentJob, proceed: Callable[[], Any]) -> Any:
        before(self, job)
        result = proceed()
        return after(self, job, result)

    async def run_async(self, job: pgqueue.CurrentJob, proceed: Callable[[], Awaitable[Any]]) -> Any:
        before(self, job)
        result = await proceed()
        return after(self, job, result)


def before(middleware: Any, job: pgqueue.CurrentJob) -> None:
    middleware.said.append(f"{middleware.name} before {job.task} {job.attempt}")


def after(middleware: Any, job: pgqueue.CurrentJob, result: Any) -> Any:
    middleware.said.append(f"{middleware.name} after {result}")
    return result


class Says(Both):
    def __init__(self, name: str, said: list[str]) -> None:
        self.name = name
        self.said = said


@pytest.mark.parametrize("colour", ["plain", "async"])
def test_the_first_middleware_is_the_outermost(colour: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    said: list[str] = []
    pq.middleware(Says("outer", said))
    pq.middleware(Says("inner", said))

    def body() -> int:
        said.append(f"runs {pgqueue.current_job().attempt}")
        return 5

    define(pq, colour, body).enqueue()
    with running(pq):
        wait_for_count(admin, 1, "archive", "state = 'completed'")
    assert said == ["outer before work 1", "inner before work 1", "runs 1", "inner after 5", "outer after 5"]


class Breaks(pgqueue.Middleware):
    """Goes wrong in one of many ways."""

    def __init__(self, how: str) -> None:
        self.how = how

    def run(self, job: pgqueue.CurrentJob, proceed: Callable[[], Any]) -> Any:
        if self.how == "calls nothing":
            return None
        if self.how == "raises before":
            raise ValueError("before")
        try:
            return proceed()
        except Exception:
            if self.how == "swallows":
                return None
            if self.how == "raises another":
                raise ValueError("another") from None
            raise
        finally:
            if self.how == "raises after":
                raise ValueError("after")
            if self.how == "leaves":
                raise SystemExit(1)

    async def run_async(self, job: pgqueue.CurrentJob, proceed: Callable[[], Awaitable[Any]]) -> Any:
        if self.how == "calls nothing":
            return None
        if self.how == "raises before":
            raise ValueError("before")
        try:
            return await proceed()
        except Exception:
            if self.how == "swallows":
                return None
            if self.how == "raises another":
                raise ValueError("another") from None
            raise
        finally:
            if self.how == "raises after":
                raise ValueError("after")
            if self.how == "leaves":
                raise SystemExit(1)


@pytest.mark.parametrize(
    ("how", "fails", "kind"),
    [
        ("calls nothing", False, "pgqueue.errors.TaskError"), ("raises before", False, "ValueError"),
        ("raises after", False, "ValueError"), ("leaves", False, "SystemExit"),
        ("swallows", True, "KeyError"), ("raises another", True, "ValueError"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("colour", ["plain", "async"])
def test_a_middleware_cannot_make_a_job_done(
    colour: str, how: str, fails: bool, kind: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    def body() -> None:
        if fails:
            raise KeyError("no")

    pq.middleware(Breaks(how))
    job_id = define(pq, colour, body, max_attempts=1).enqueue()
    with running(pq) as worker:
        wait_for_count(admin, 1, "dead_letter")
        worker.wait_for(pgqueue.EventName.JOB_FAILED, id=job_id, error=kind)
        assert worker.thread.is_alive()
    assert count(admin, "archive") == 0


@pytest.mark.parametrize("colour", ["plain", "async"])
def test_signals_and_timeouts_pass_through_middleware(colour: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.middleware(Says("m", []))

    def snooze() -> None:
        raise pgqueue.Snooze(3600)

    define(pq, colour, snooze, name="snooze").enqueue()

    @pq.task(name="slow", queue="q", timeout=0.2, max_attempts=1)
    async def slow() -> None:
        await asyncio.sleep(60)

    slow.enqueue()
    with running(pq):
        wait_for_count(admin, 1, "dead_letter", "task = 'slow' AND reason LIKE 'TimeoutError%'")
        wait_for_count(admin, 1, "job", "task = 'snooze' AND attempt = 0 AND run_at IS NOT NULL")


class Stamps(pgqueue.Middleware):
    def __init__(self) -> None:
        self.calls: list[pgqueue.EnqueueCall] = []

    def enqueue(self, call: pgqueue.EnqueueCall) -> None:
        self.calls.append(call)
        if call.args == [13] or call.args == (13,):
            raise PermissionError("not thirteen")
        call.headers["stamp"] = "x"


def test_middleware_adds_headers_and_refuses_before_anything_is_sent(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    stamps = Stamps()
    pq.middleware(stamps)
    task = define(pq, "plain", lambda number: None)
    with psycopg.connect(database) as caller:
        one = task.enqueue(1, using=caller)
        with pytest.raises(PermissionError, match="not thirteen"):
            task.enqueue(13, using=caller)
        with pytest.raises(PermissionError, match="not thirteen"):
            pq.enqueue("unknown.here", [13], queue="q", using=caller)
        two = pq.enqueue("unknown.here", [2], queue="q", headers={"own": 1}, using=caller)
        many = task.enqueue_many([(3,), (13,)], using=caller)
        keyed = task.options(ordering_key="k").enqueue(4, using=caller)
        caller.commit()
    rows = dict(admin.execute("SELECT id, headers FROM pgqueue.job").fetchall())
    assert rows.pop(two) == {"own": 1, "stamp": "x"}
    assert list(rows) == [one, *many, keyed]
    assert all(headers == {"stamp": "x"} for headers in rows.values())
    assert [(call.task, call.queue, call.args) for call in stamps.calls if call.args is None] == [("work", "q", None)]


def test_the_headers_of_one_call_do_not_stick_to_the_next(pq: pgqueue.PgQueue, admin: Admin) -> None:
    class Numbers(pgqueue.Middleware):
        def enqueue(self, call: pgqueue.EnqueueCall) -> None:
            if call.args == (1,):
                call.headers["first"] = True

    pq.middleware(Numbers())
    task = define(pq, "plain", lambda number: None, headers={"always": 1})
    task.enqueue(1)
    task.enqueue(2)
    rows = admin.execute("SELECT headers FROM pgqueue.job ORDER BY id").fetchall()
    assert rows == [({"always": 1, "first": True},), ({"always": 1},)]


@pytest.mark.parametrize("colour", ["plain", "async"])
def test_a_context_variable_travels_with_a_job_through_retries_and_redrive(
    colour: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    pq.middleware(pgqueue.CopyContext({"tenant": tenant}))
    seen: list[Any] = []

    def body() -> None:
        seen.append((tenant.get("nobody"), pgqueue.current_job().headers.get("tenant")))
        tenant.set("changed by the handler")
        raise ValueError("again")

    task = define(pq, colour, body, max_attempts=2, retry=pgqueue.Fixed(0))
    token = tenant.set({"id": 7})
    task.enqueue()
    tenant.reset(token)
    with running(pq):
        wait_for_count(admin, 1, "dead_letter")
        pq.redrive()
        wait_for_count(admin, 1, "dead_letter", "attempt = 2 AND jsonb_array_length(errors) = 4")
        task.enqueue()
        wait_for_count(admin, 2, "dead_letter")
    assert seen == [({"id": 7}, {"id": 7})] * 4 + [("nobody", None)] * 2


@pytest.mark.parametrize("colour", ["plain", "async"])
def test_jobs_that_a_handler_enqueues_inherit_the_declared_headers_and_no_others(
    colour: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    pq.middleware(pgqueue.InheritHeaders("traceparent", "missing"))
    child = pq.task(name="child", queue="other")(lambda: None)

    def parent() -> None:
        child.enqueue()
        child.options(headers={"traceparent": "own"}).enqueue()
        child.enqueue_many([()])

    define(pq, colour, parent, headers={"traceparent": "00-a-b-01", "private": 1}).enqueue()
    child.enqueue()  # outside of any job
    with running(pq, queues=("q",)):
        wait_for_count(admin, 1, "archive", "state = 'completed'")
    rows = admin.execute("SELECT headers FROM pgqueue.job ORDER BY id").fetchall()
    inherited = {"traceparent": "00-a-b-01"}
    assert rows == [(None,), (inherited,), ({"traceparent": "own"},), (inherited,)]


ISOLATED = """
    from contextvars import ContextVar

    import pgqueue

    pq = pgqueue.PgQueue()
    tenant = ContextVar("tenant")
    pq.middleware(pgqueue.CopyContext({"tenant": tenant}))


    class Lazy(pgqueue.Middleware):
        def run(self, job, proceed):
            return None if job.headers.get("lazy") else proceed()


    pq.middleware(Lazy())


    def note(kind):
        with open("marks", "a") as file:
            file.write(f"{kind} {tenant.get()}\\n")


    @pq.task(queue="images", isolation="process", max_attempts=1, name="plain")
    def plain(kind):
        note(kind)


    @pq.task(queue="images", isolation="process", max_attempts=1, name="coroutine")
    async def coroutine(kind):
        note(kind)
"""


def test_middleware_works_in_child_processes(tmp_path: Path, database: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    cli = CommandLine(tmp_path, database)
    cli.write("wrapped.py", ISOLATED)
    for name in ("plain", "coroutine"):
        pq.enqueue(name, [name], queue="images", headers={"tenant": 7})
    pq.enqueue("plain", ["lazy"], queue="images", max_attempts=1, headers={"tenant": 8, "lazy": True})
    with cli.started("worker", "--app", "wrapped", "--drain") as program:
        assert program.wait(90) == 0, program.errors
    assert sorted(cli.marks()) == ["coroutine 7", "plain 7"]
    assert count(admin, "dead_letter", "args->>0 = 'lazy' AND reason LIKE '%without running the function%'") == 1


def test_ticks_are_made_without_the_enqueue_of_middleware_and_run_through_it(pq: pgqueue.PgQueue, admin: Admin) -> None:
    asked: list[str] = []
    ran: list[str] = []

    class Watch(pgqueue.Middleware):
        def enqueue(self, call: pgqueue.EnqueueCall) -> None:
            asked.append(call.task)

        def run(self, job: pgqueue.CurrentJob, proceed: Callable[[], Any]) -> Any:
            ran.append(job.headers["schedule"])
            return proceed()

    pq.middleware(Watch())
    pq.schedule(every=3600, name="hourly")(define(pq, "plain", lambda: None))
    with running(pq) as worker:
        worker.wait_for(pgqueue.EventName.SCHEDULE_DEFINED, names=["hourly"])
        assert pq.run_schedule("hourly")
        wait_for_count(admin, 1, "archive", "state = 'completed'")
    assert (asked, ran) == ([], ["hourly"])


def test_what_is_no_middleware_is_refused() -> None:
    class Coroutine(pgqueue.Middleware):
        async def run(self, job: Any, proceed: Any) -> Any: ...

    class Plain(pgqueue.Middleware):
        def run_async(self, job: Any, proceed: Any) -> Any: ...

    class Awaited(pgqueue.Middleware):
        async def enqueue(self, call: Any) -> None: ...  # type: ignore[override]

    pq = pgqueue.PgQueue()
    for wrong in (5, Says, object(), Coroutine(), Plain(), Awaited()):
        with pytest.raises(pgqueue.ConfigurationError):
            pq.middleware(wrong)  # type: ignore[arg-type]
    for make in (lambda: pgqueue.CopyContext({"x": 5}), lambda: pgqueue.CopyContext(5), pgqueue.InheritHeaders,  # type: ignore[dict-item,arg-type]
                 lambda: pgqueue.InheritHeaders(5)):  # type: ignore[arg-type]  # fmt: skip
        with pytest.raises(pgqueue.ConfigurationError):
            make()


async def test_the_async_client_wraps_its_enqueues(database: str, admin: Admin) -> None:
    async with pgqueue.AsyncPgQueue(database) as pq:
        pq.middleware(Stamps())
        pq.middleware(pgqueue.CopyContext({"tenant": tenant}))

        @pq.task(name="work", queue="q")
        async def work(number: int) -> None: ...

        token = tenant.set("t")
        await work.enqueue(1)
        tenant.reset(token)
        with pytest.raises(PermissionError):
            await work.enqueue(13)
    assert admin.execute("SELECT headers FROM pgqueue.job").fetchall() == [({"stamp": "x", "tenant": "t"},)]


def test_a_value_that_is_no_json_is_refused_at_the_enqueue(pq: pgqueue.PgQueue) -> None:
    pq.middleware(pgqueue.CopyContext({"tenant": tenant}))
    token = tenant.set(object())
    with pytest.raises(pgqueue.PayloadError, match="headers"):
        pq.enqueue("work", queue="q")
    tenant.reset(token)


@pytest.mark.parametrize("colour", ["plain", "async"])
def test_a_job_knows_the_queue_that_its_worker_serves(colour: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    seen: list[Any] = []
    define(pq, colour, lambda: seen.append(pgqueue.current_job().served_by)).enqueue()
    with running(pq):
        wait_for_count(admin, 1, "archive", "state = 'completed'")
    assert seen == [pq]


class Forgets(pgqueue.Middleware):
    """Returns something else, or nothing."""

    def run(self, job: pgqueue.CurrentJob, proceed: Callable[[], Any]) -> None:
        proceed()

    async def run_async(self, job: pgqueue.CurrentJob, proceed: Callable[[], Awaitable[Any]]) -> str:
        await proceed()
        return "something else"


@pytest.mark.parametrize("colour", ["plain", "async"])
def test_the_result_that_is_kept_is_what_the_function_returned(colour: str, pq: pgqueue.PgQueue) -> None:
    pq.middleware(Forgets())
    job_id = define(pq, colour, lambda: {"a": 1}, keep_result=60).enqueue()
    with running(pq):
        assert pq.wait(job_id, PATIENCE).value == {"a": 1}
