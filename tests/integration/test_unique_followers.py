"""What follows the jobs of unique keys, among open transactions, settles and claims."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

import pgqueue
from pgqueue.ops import unique as unique_ops
from tests.integration.test_unique_races import Admin, follow, isolated, make, meanwhile, rows
from tests.waiting import wait_until
from tests.workers import count


def test_a_superseding_enqueue_that_rolls_back_leaves_the_running_job_as_it_was(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    task = make(pq, on_conflict="supersede")
    first = task.enqueue(1)
    [job] = pq.claim("q")
    with psycopg.connect(database) as caller:
        task.enqueue(2, using=caller)
        pq.fail(job, "x", delay=0)
        caller.rollback()
    assert [one.id for one in pq.claim("q")] == [first]
    assert follow(pq) == []


def test_a_job_that_was_claimed_again_before_the_superseding_one_was_seen_runs_before_it(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    """The superseding transaction commits after the retry looked for one, and before anything follows."""
    task = make(pq, on_conflict="supersede")
    first = task.enqueue(1)
    [job] = pq.claim("q")
    with psycopg.connect(database) as caller:
        second = task.enqueue(2, using=caller)
        pq.release(job)
        [again] = pq.claim("q")
        caller.commit()
    assert again.id == first
    assert follow(pq) == []
    assert pq.claim("q") == []
    pq.release(again)
    assert rows(admin, "id, state FROM pgqueue.archive") == [(first, "superseded")]
    assert follow(pq) == [second]


def test_a_settle_whose_snapshot_is_older_than_the_newer_job_gives_way_to_it(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    task = make(pq, on_conflict="supersede")
    first = task.enqueue(1)
    [job] = pq.claim("q")
    with isolated(database, psycopg.IsolationLevel.REPEATABLE_READ) as worker:
        second = task.enqueue(2)
        pq.fail(job, "x", delay=0, using=worker)
        worker.commit()
    assert follow(pq) == [second]
    assert rows(admin, "id, state FROM pgqueue.archive") == [(first, "superseded")]
    assert [one.id for one in pq.claim("q", limit=2)] == [second]


# What follows, against everything


def test_what_follows_waits_for_nobody_and_never_runs_beside_an_enqueue_that_it_cannot_see(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    """Two slow enqueues overlap, and the running job ends between them: each sees a free place, but not the other's."""
    task = make(pq, on_conflict="supersede")
    first = task.enqueue(1)
    [job] = pq.claim("q")
    with psycopg.connect(database) as slow, psycopg.connect(database) as slower:
        second = task.enqueue(2, using=slow)
        pq.complete(job)
        third = task.enqueue(3, using=slower)
        slow.commit()
        assert follow(pq) == []
        assert pq.claim("q") == []
        slower.commit()
    assert len({first, second, third}) == 3
    [running] = pq.claim("q", limit=5)
    assert running.id == third
    assert follow(pq) == [], "it waits for the end of the one that was quicker"
    pq.complete(running)
    assert follow(pq) == [second]


def test_what_follows_replaces_an_unseen_enqueue_that_has_not_begun(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    task = make(pq, on_conflict="supersede")
    task.enqueue(1)
    [job] = pq.claim("q")
    with psycopg.connect(database) as slow, psycopg.connect(database) as slower:
        second = task.enqueue(2, using=slow)
        pq.complete(job)
        third = task.options(on_conflict="skip").enqueue(3, using=slower)
        slow.commit()
        slower.commit()
    assert follow(pq) == [second]
    assert rows(admin, "state, reason FROM pgqueue.archive WHERE id = " + str(third)) == [
        ("superseded", "superseded while waiting")]  # fmt: skip


def test_one_key_that_cannot_follow_holds_up_no_other(pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    task = make(pq, unique_key=lambda n: f"n:{n % 10}", on_conflict="supersede")
    task.enqueue_many([(n,) for n in range(10)])
    jobs = pq.claim("q", limit=10)
    ids = task.enqueue_many([(n,) for n in range(10, 20)])
    pq.complete(jobs)
    admin.execute("UPDATE pgqueue.job SET next_key = 'apart' WHERE id = " + str(ids[4]))  # as if not committed yet
    with psycopg.connect(database) as slow:
        other = task.options(unique_key="n:4").enqueue(4, using=slow)
        admin.execute("UPDATE pgqueue.job SET next_key = 'n:4' WHERE id = " + str(ids[4]))
        assert follow(pq) == [*ids[:4], *ids[5:]]
        slow.commit()
    assert other not in ids
    assert follow(pq) == [ids[4]]


def test_what_follows_leaves_a_job_alone_that_an_open_transaction_changes(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    task = make(pq, on_conflict="supersede")
    task.enqueue(1)
    [job] = pq.claim("q")
    second = task.enqueue(2)
    with psycopg.connect(database) as caller:
        assert task.enqueue(3, using=caller) == second
        pq.complete(job)
        assert follow(pq) == []
        caller.commit()
    assert follow(pq) == [second]
    assert pq.claim("q")[0].args == [3]


def test_what_follows_leaves_a_waiting_job_alone_that_is_being_claimed(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    task = make(pq, on_conflict="supersede")
    first = task.enqueue(1)
    [job] = pq.claim("q")
    with psycopg.connect(database) as caller, psycopg.connect(database) as claimer:
        second = task.enqueue(2, using=caller)
        pq.release(job)
        [again] = pq.claim("q", using=claimer)
        caller.commit()
        assert follow(pq) == []
        claimer.commit()
    assert again.id == first
    assert follow(pq) == []
    pq.complete(again)
    assert follow(pq) == [second]


def test_many_followers_at_once_move_each_job_once(pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    task = make(pq, unique_key=lambda n: f"n:{n % 200}", on_conflict="supersede")
    task.enqueue_many([(n,) for n in range(200)])
    jobs = pq.claim("q", limit=200)
    ids = task.enqueue_many([(n,) for n in range(200, 400)])
    pq.complete(jobs)
    with ThreadPoolExecutor(4) as pool:
        moved = [
            one for some in pool.map(lambda _: pq.run(unique_ops.follow("q", archive=True)), range(8)) for one in some
        ]
    assert sorted(moved) == sorted(ids)
    assert len(pq.claim("q", limit=400)) == 200


def test_two_redrives_and_an_enqueue_leave_one_job_of_a_key(pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    task = make(pq, max_attempts=1)
    dead = task.enqueue(1)
    pq.fail(pq.claim("q"), "x")
    with psycopg.connect(database) as operator:
        assert list(pq.redrive(using=operator)) == [dead]
        with meanwhile(lambda: task.enqueue(2), admin) as late:
            assert pq.redrive() == []
            operator.commit()
        assert late.result() == dead
    with psycopg.connect(database) as caller:
        pq.fail(pq.claim("q"), "x")
        second = task.enqueue(3, using=caller)
        with meanwhile(lambda: pq.redrive(), admin) as redriven:
            caller.commit()
        assert (list(redriven.result()), redriven.result().skipped) == ([], [dead])
    assert rows(admin, "id FROM pgqueue.job") == [(second,)]


@pytest.mark.parametrize("mode", ["skip", "replace", "merge", "supersede"])
def test_no_two_jobs_of_a_key_ever_run_at_once(mode: str, pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    """Producers, of whom some roll back, and workers that end jobs in every way, on few keys."""
    task = make(pq, unique_key=lambda key, _: key, on_conflict=mode, max_attempts=1000)
    admin.execute("CREATE TABLE running (key text PRIMARY KEY)")
    errors: list[BaseException] = []
    committed: list[tuple[int, int]] = []
    done = threading.Event()

    def produce(seed: int) -> None:
        choose = random.Random(seed)
        with psycopg.connect(database) as caller:
            for number in range(60):
                key = f"k{choose.randrange(3)}"
                job_id = task.enqueue(key, [1000 * seed + number], using=caller)
                if choose.random() < 0.2:
                    caller.rollback()
                else:
                    caller.commit()
                    committed.append((job_id, 1000 * seed + number))

    def work(seed: int) -> None:
        choose = random.Random(seed)
        with pgqueue.PgQueue(database) as mine, psycopg.connect(database, autocommit=True) as own:
            while not done.is_set():
                if choose.random() < 0.3:
                    follow(mine)
                for job in mine.claim("q", limit=2):
                    own.execute("INSERT INTO running VALUES (%s)", [job.args[0]])
                    own.execute("SELECT pg_sleep(0.002)")
                    own.execute("DELETE FROM running WHERE key = %s", [job.args[0]])
                    end = choose.choice(["complete", "complete", "release", "fail"])
                    getattr(mine, end)(
                        job, *(["x"] if end == "fail" else []), **({"delay": 0} if end == "fail" else {})
                    )

    def guarded(call: Callable[[int], None], seed: int) -> None:
        try:
            call(seed)
        except BaseException as error:
            errors.append(error)

    producers = [threading.Thread(target=guarded, args=(produce, seed)) for seed in range(3)]
    workers = [threading.Thread(target=guarded, args=(work, seed)) for seed in range(3)]
    for thread in producers + workers:
        thread.start()
    for thread in producers:
        thread.join(60)
    drained = lambda: errors or count(admin, "job") == 0  # noqa: E731
    wait_until(drained, 60, "everything has run")
    done.set()
    for thread in workers:
        thread.join(30)
    assert errors == []
    ended = {job_id for (job_id,) in rows(admin, "id FROM pgqueue.archive")}
    assert {job_id for job_id, _ in committed} == ended
    if mode == "merge":
        items = [item for (args,) in rows(admin, "args FROM pgqueue.archive") for item in args[1]]
        assert sorted(items) == sorted(item for _, item in committed), "no item is lost, and none is there twice"
