"""Roles of least privilege, each tried by a session that belongs to it: it does its work, and can do nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import migrate, roles
from pgqueue.ops import ageing as ageing_ops
from pgqueue.ops import rescue as rescue_ops
from pgqueue.ops import schedule as schedule_ops
from pgqueue.ops import worker as worker_ops
from pgqueue.sql import TEXTS
from pgqueue.sql.rights import rights
from tests.conftest import execute
from tests.logins import drop_roles, login, roles_of_test
from tests.workers import count, running, wait_for_count

Admin = psycopg.Connection[Any]

PAYLOADS = {
    "job": {"args", "kwargs", "headers", "errors"},
    "dead_letter": {"args", "kwargs", "headers", "errors", "reason"},
    "archive": {"args", "kwargs", "headers", "errors", "reason"},
    "schedule": {"args", "kwargs", "headers"},
    "result": {"value", "error"},
    "subscription": {"headers"},
    "message": {"args", "kwargs", "headers"},
}
OF_ENDS = {"id", "queue", "state", "reason", "finished_at"}
"""What a worker may read of the archive: how jobs ended."""
ENQUEUED = (
    *("id", "queue", "task", "args", "kwargs", "priority", "position", "run_at"),
    *("max_attempts", "timeout", "retry", "headers", "created_at", "expires_at"),
    *("unique_key", "lane", "lane_rank", "lane_width", "park"),
)
EVERYTHING = "DELETE INSERT SELECT UPDATE"
MATRIX: dict[str, dict[str, str]] = {
    "schema pgqueue": {"worker": "USAGE", "producer": "USAGE", "reader": "USAGE"},
    "job": {"worker": EVERYTHING},
    "lease": {"worker": EVERYTHING, "reader": "SELECT"},
    "worker": {"worker": EVERYTHING, "reader": "SELECT"},
    "dead_letter": {"worker": EVERYTHING},
    "archive": {"worker": "INSERT"},
    "queue": {"worker": "INSERT SELECT UPDATE", "reader": "SELECT"},
    "unique_window": {"worker": EVERYTHING, "producer": "INSERT SELECT UPDATE", "reader": "SELECT"},
    "admission": {"worker": EVERYTHING, "reader": "SELECT"},
    "admission_id_seq": {},
    "lane": {"worker": "INSERT SELECT UPDATE", "reader": "SELECT"},
    "schedule": {"worker": EVERYTHING},
    "result": {"worker": EVERYTHING, "producer": "SELECT"},
    "kept_task": {"worker": EVERYTHING, "reader": "SELECT"},
    "progress": {"worker": EVERYTHING, "producer": "SELECT", "reader": "SELECT"},
    "topic": {"worker": EVERYTHING, "producer": "SELECT", "reader": "SELECT"},
    "topic_number_seq": {},
    "subscription": {"worker": EVERYTHING, "producer": "SELECT"},
    "message": {"worker": "INSERT SELECT", "producer": "INSERT"},
    "message_id_seq": {"worker": "USAGE", "producer": "USAGE"},
    "schema_version": {"worker": "SELECT", "reader": "SELECT"},
    "job_id_seq": {"worker": "USAGE", "producer": "USAGE"},
    "lease_tie_seq": {"worker": "USAGE"},
    "worker_id_seq": {},
    "archive_roll": {"worker": "EXECUTE"},
    "payload_merge": {"worker": "EXECUTE"},
    "unique_follow": {"worker": "EXECUTE"},
    "unique_expire": {"worker": "EXECUTE", "producer": "EXECUTE"},
    "topic_roll": {"worker": "EXECUTE"},
}
"""What each role may do on the whole of an object. A new table fails the test until somebody has decided about it."""

GRANTED = """
    SELECT thing, coalesce(r.rolname, 'PUBLIC'), string_agg(right_, ' ' ORDER BY right_)
    FROM (SELECT 'schema ' || nspname AS thing, (aclexplode(nspacl)).grantee, (aclexplode(nspacl)).privilege_type AS right_
          FROM pg_namespace WHERE nspname = 'pgqueue'
          UNION ALL
          SELECT relname, (aclexplode(relacl)).grantee, (aclexplode(relacl)).privilege_type
          FROM pg_class WHERE relnamespace = 'pgqueue'::regnamespace
          UNION ALL
          SELECT proname, (aclexplode(proacl)).grantee, (aclexplode(proacl)).privilege_type
          FROM pg_proc WHERE pronamespace = 'pgqueue'::regnamespace) AS given
    LEFT JOIN pg_roles AS r ON r.oid = grantee
    WHERE grantee = 0 OR r.rolname LIKE %s
    GROUP BY 1, 2
"""
GRANTED_COLUMNS = """
    SELECT relname, r.rolname, right_, array_agg(attname::text)
    FROM (SELECT c.relname, a.attname, (aclexplode(a.attacl)).grantee, (aclexplode(a.attacl)).privilege_type AS right_
          FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
          WHERE c.relnamespace = 'pgqueue'::regnamespace AND a.attacl IS NOT NULL) AS given
    JOIN pg_roles AS r ON r.oid = grantee
    WHERE r.rolname LIKE %s
    GROUP BY 1, 2, 3
"""
OBJECTS = """
    SELECT relname FROM pg_class
    WHERE relnamespace = 'pgqueue'::regnamespace AND relkind IN ('r', 'p', 'v', 'm', 'f', 'S') AND NOT relispartition
    UNION ALL
    SELECT proname FROM pg_proc WHERE pronamespace = 'pgqueue'::regnamespace
"""


@pytest.fixture
def prefix(database: str) -> Iterator[str]:
    with roles_of_test(database) as prefix:
        yield prefix


@contextmanager
def acting(database: str, prefix: str, kind: str, **options: Any) -> Iterator[pgqueue.PgQueue]:
    """A queue whose sessions belong to a member of that role."""
    roles.create(database, prefix=prefix, **options)
    with login(database, f"{prefix}_{kind}") as url, pgqueue.PgQueue(url, notify=True) as pq:
        yield pq


def granted(database: str, prefix: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for thing, role, some in execute(database, GRANTED, f"{prefix}\\_%"):
        found.setdefault(thing, {})[role.removeprefix(f"{prefix}_")] = some
    return found


def granted_columns(database: str, prefix: str) -> dict[tuple[str, str, str], set[str]]:
    rows = execute(database, GRANTED_COLUMNS, f"{prefix}\\_%")
    return {(table, role.removeprefix(f"{prefix}_"), right): set(names) for table, role, right, names in rows}


def columns(database: str, table: str) -> set[str]:
    rows = execute(
        database,
        "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped",
        f"pgqueue.{table}",
    )
    return {name for (name,) in rows}


def refused(url: str, *statements: str) -> None:
    """PostgreSQL itself forbids each of these."""
    with psycopg.connect(url, autocommit=True) as session:
        for statement in statements:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                session.execute(statement.encode())
            assert session.info.transaction_status == psycopg.pq.TransactionStatus.IDLE, statement


def refused_calls(pq: pgqueue.PgQueue, calls: dict[str, Callable[[], Any]]) -> None:
    """Each is refused in one sentence that names the right."""
    for right, call in calls.items():
        with pytest.raises(pgqueue.SchemaError) as caught:
            call()
        assert right in str(caught.value), str(caught.value)
        assert "no right" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_every_right_on_every_object_is_written_down(database: str, prefix: str) -> None:
    made = roles.create(database, prefix=prefix)
    assert made.made == made.names == roles.names(prefix=prefix)
    assert {name for (name,) in execute(database, OBJECTS)} | {"schema pgqueue"} == set(MATRIX)
    assert granted(database, prefix) == {thing: given for thing, given in MATRIX.items() if given}
    assert granted_columns(database, prefix) == {
        ("job", "producer", "INSERT"): set(ENQUEUED),
        ("job", "producer", "SELECT"): {"id", "queue", "unique_key", "next_key", "expires_at"},
        ("admission", "producer", "INSERT"): {"queue", "lane"},
        ("archive", "worker", "SELECT"): OF_ENDS,
        **{(table, "reader", "SELECT"): columns(database, table) - hidden for table, hidden in PAYLOADS.items()},
    }


def test_no_statement_needs_more_than_the_worker_may(database: str, prefix: str) -> None:
    roles.create(database, prefix=prefix, with_payloads=True)
    given = granted(database, prefix)
    for name in TEXTS:
        # What shows arguments is for readers of payloads.
        role = "reader" if name == "job_whole" else "worker"
        for thing, needed in rights(name).items():
            # Of the archive single columns may be read, which the test above lists.
            may = {*given[thing][role].split(), *(["SELECT"] if (name, thing) == ("job_ends", "archive") else [])}
            assert set(needed) <= may, (name, thing)


def test_a_second_run_makes_no_role_and_takes_away_what_is_too_much(database: str, prefix: str) -> None:
    roles.create(database, prefix=prefix, with_payloads=True)
    before = granted(database, prefix)
    assert before["job"]["reader"] == "SELECT"
    execute(database, f"GRANT UPDATE ON pgqueue.job TO {prefix}_reader")
    execute(database, f"GRANT TRUNCATE ON pgqueue.queue TO {prefix}_worker")
    execute(database, f"GRANT UPDATE (lost) ON pgqueue.job TO {prefix}_producer")
    assert roles.create(database, prefix=prefix).made == ()
    assert granted(database, prefix) == {thing: given for thing, given in MATRIX.items() if given}
    assert ("job", "producer", "UPDATE") not in granted_columns(database, prefix)


def test_the_script_grants_what_a_run_grants(database: str, prefix: str) -> None:
    with psycopg.connect(database, autocommit=True) as session:
        session.execute(roles.script(prefix=prefix, with_payloads=True).encode())
    by_script = granted(database, prefix), granted_columns(database, prefix)
    roles.create(database, prefix=prefix, with_payloads=True)
    assert (granted(database, prefix), granted_columns(database, prefix)) == by_script


def test_a_worker_runs_jobs_under_its_role(database: str, prefix: str, admin: Admin) -> None:
    with acting(database, prefix, "worker") as pq:

        @pq.task(name="parent", queue="q")
        def parent() -> None:
            pq.enqueue("child", queue="q")

        @pq.task(name="child", queue="q", max_attempts=2, retry=pgqueue.Fixed(0.05))
        def child() -> None:
            job = pgqueue.current_job()
            job.extend(60)
            if job.attempt == 1:
                raise ValueError("once")

        @pq.task(name="hopeless", queue="q", max_attempts=1)
        def hopeless() -> None:
            raise ValueError

        parent.options(delay=0.1).enqueue()
        hopeless.enqueue()
        lost = pq.enqueue("child", queue="q")
        assert lost in [job.id for job in pq.claim("q", limit=10, lease=0.1)]
        with running(pq, lease=2.0) as watched:
            wait_for_count(admin, 0, "job")
            assert not watched.seen(pgqueue.EventName.LOOP_FAILED)
            pq.add_schedule("s", "child", every=1, queue="elsewhere")
            watched.wait_for(pgqueue.EventName.SCHEDULE_TICKED, schedule="s")
            assert not watched.seen(pgqueue.EventName.LOOP_FAILED)
        assert count(admin, "archive", f"id = {lost} AND lost = 1") == 1
        assert count(admin, "archive", "state = 'completed'") == 3
        assert count(admin, "dead_letter") == 1
        assert count(admin, "lease") == count(admin, "worker") == 0


def test_what_a_worker_does_now_and_then_and_what_an_operator_does(database: str, prefix: str, admin: Admin) -> None:
    with acting(database, prefix, "worker") as pq:
        [(day,)] = execute(database, "SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')")
        execute(database, f"DROP TABLE pgqueue.archive_{day}")
        assert pq.run(rescue_ops.roll_archive(7.0)) >= 1
        pq.run(worker_ops.prune())
        pq.enqueue("t", queue="q")
        [job] = pq.claim("q")
        admin.execute("DELETE FROM pgqueue.lease")
        assert pq.run(rescue_ops.adopt("q")) == [job.id]
        assert pq.rescue("q").returned == [job.id]
        pq.pause("q")
        assert pq.claim("q") == []
        assert pq.resume("q")
        pq.pause("q", task="t", seconds=60)
        assert pq.resume("q", task="t")
        pq.set_queue("q", ageing=60)
        pq.run(ageing_ops.age("q"))
        assert pq.expire("q") == []
        assert pq.count_live(queue="q") == (1, 0)
        for _ in range(2):
            pq.fail(pq.claim("q"), pgqueue.DeadLetter("hopeless"))
            assert pq.dead_letters()[0].reason
            assert pq.count_dead_letters() == 1
            assert pq.redrive() == [job.id]
        pq.fail(pq.claim("q"), pgqueue.DeadLetter("hopeless"))
        assert pq.purge() == 1
        assert pq.cancel(pq.enqueue("t", queue="q"))
        pq.enqueue("t", queue="q")
        assert pq.cancel_all(queue="q") == (1, 0)
        assert pq.status()[0].queue == "q"
        assert pq.workers() == pq.jobs() == []
        pq.schedule(every=60)(pq.task(name="nightly", queue="q")(lambda: None))
        assert pq.run(schedule_ops.define(pq.code_schedules)) == ["nightly"]
        assert pq.run(schedule_ops.forget()) == []
        pq.add_schedule("s", "t", every=60)
        pq.change_schedule("s", every=90)
        pq.pause_schedule("s")
        pq.resume_schedule("s")
        assert pq.run_schedule("s")
        pq.remove_schedule("s")
        assert [schedule.name for schedule in pq.schedules()] == ["nightly"]
        pq.keep_topic("orders", count=10)
        assert pq.publish("orders", [1]).jobs == 0
        assert pq.subscribe("orders", "t", group="g", queue="q", start="beginning")
        assert pq.tend_topics() == 1
        pq.reset_subscription("orders", "g")
        pq.unsubscribe("orders", "g")
        pq.keep_topic("orders")
        assert pq.tend_topics() == 0
        assert pq.topics()[0].messages == len(pq.subscriptions()) == 0
        assert migrate.check(str(pq.settings.database_url)).state is migrate.SchemaState.CURRENT


def test_a_worker_changes_no_table_and_empties_none(database: str, prefix: str) -> None:
    with acting(database, prefix, "worker") as pq:
        refused(
            str(pq.settings.database_url),
            "TRUNCATE pgqueue.job",
            "TRUNCATE pgqueue.worker",
            "CREATE TABLE pgqueue.mine ()",
            "ALTER TABLE pgqueue.job ADD COLUMN mine int",
            "DROP TABLE pgqueue.lease",
            "CREATE INDEX ON pgqueue.job (task)",
            "SELECT setval('pgqueue.job_id_seq', 1)",
            "DELETE FROM pgqueue.queue",
            "SELECT * FROM pgqueue.archive",
            "DELETE FROM pgqueue.archive",
            "SELECT * FROM pgqueue.archive_rest",
            "UPDATE pgqueue.schema_version SET version_num = '9999'",
            "CREATE ROLE somebody",
        )
        before = granted(database, prefix)
        execute(str(pq.settings.database_url), f"GRANT UPDATE ON pgqueue.job TO {prefix}_producer")  # only a warning
        assert granted(database, prefix) == before


def test_a_producer_enqueues_in_every_way(database: str, prefix: str, admin: Admin) -> None:
    with acting(database, prefix, "producer") as pq:

        @pq.task(name="t", queue="q", retry=pgqueue.Fixed(3), timeout=5.0)
        def task(number: int) -> None: ...

        ids = [task.enqueue(1), task.options(delay=60, priority=5, headers={"trace": "x"}).enqueue(2)]
        ids += task.enqueue_many((number,) for number in range(12_000))
        ids.append(pq.enqueue("elsewhere", [1], queue="q"))
        with psycopg.connect(str(pq.settings.database_url)) as mine:
            ids.append(task.enqueue(3, using=mine))
            ids += task.enqueue_many([(4,), (5,)], using=mine)
        ids.append(task.options(ordering_key="a").enqueue(6))
        ids += task.options(concurrency_key="a", concurrency_limit=1).enqueue_many([(7,)])
        assert len(set(ids)) == count(admin, "job") == 12_008


def test_a_producer_publishes(database: str, prefix: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.keep_topic("orders", count=10)
    pq.subscribe("orders", "t", group="g", queue="q", ordered=True)
    with acting(database, prefix, "producer") as producer:
        assert producer.publish("orders", [1], key="a").jobs == 1
        assert producer.publish_many("orders", [(2,), (3,)]).jobs == 2
        refused_calls(
            producer,
            {
                "subscription_alter needs": lambda: producer.subscribe("orders", "t", group="h"),
                "no right": lambda: producer.unsubscribe("orders", "g"),
                "topic_keep needs": lambda: producer.keep_topic("orders"),
                "SELECT on message": producer.topics,
            },
        )
        refused(
            str(producer.settings.database_url),
            "SELECT id FROM pgqueue.message",
            "DELETE FROM pgqueue.message",
            "SELECT pgqueue.topic_roll('orders')",
        )
    assert count(admin, "job") == count(admin, "message") == 3


async def test_an_async_producer_enqueues(database: str, prefix: str, admin: Admin) -> None:
    roles.create(database, prefix=prefix)
    with login(database, f"{prefix}_producer") as url:
        async with pgqueue.AsyncPgQueue(url) as pq:

            @pq.task(name="t", queue="q")
            async def task(number: int) -> None: ...

            await task.enqueue(1)
            await task.enqueue_many([(2,), (3,)])
    assert count(admin, "job") == 3


def test_a_producer_does_nothing_but_enqueue(database: str, prefix: str) -> None:
    with acting(database, prefix, "producer") as pq:
        job_id = pq.enqueue("t", ["secret"], queue="q")
        refused_calls(
            pq,
            {
                "job_cancel needs INSERT on admission": lambda: pq.cancel(job_id),
                "needs SELECT on worker": pq.status,
                "job_list_bare needs SELECT on job": pq.jobs,
                "SELECT and UPDATE and DELETE on dead_letter": lambda: pq.purge(),
                "worker_list needs": pq.workers,
                "queue_pause needs": lambda: pq.pause("q"),
                "schedule_add needs": lambda: pq.add_schedule("s", "t", every=60),
                "queue_set_ageing needs": lambda: pq.set_queue("q", ageing=60),
                "job_page needs SELECT on job": lambda: pq.cancel_all(queue="q"),
                "permission denied": lambda: pq.claim("q"),
            },
        )
        refused(
            str(pq.settings.database_url),
            "SELECT args FROM pgqueue.job",
            "SELECT task FROM pgqueue.job",
            "SELECT * FROM pgqueue.dead_letter",
            "SELECT * FROM pgqueue.schema_version",
            "UPDATE pgqueue.job SET priority = 100",
            "DELETE FROM pgqueue.job",
            "SELECT id FROM pgqueue.job FOR UPDATE",
            "INSERT INTO pgqueue.job (queue, task, lease_id) VALUES ('q', 't', 1)",
            "INSERT INTO pgqueue.lease (queue, job_ids, claimed_at, expires_at) VALUES ('q', '{1}', now(), 'infinity')",
            "INSERT INTO pgqueue.archive VALUES (1)",
            "SELECT pgqueue.archive_roll('1 day')",
            "SELECT pgqueue.unique_follow('q', true)",
            "SELECT nextval('pgqueue.lease_tie_seq')",
            "COPY pgqueue.job TO STDOUT",
            "TRUNCATE pgqueue.job",
        )


def test_a_reader_sees_everything_but_payloads(database: str, prefix: str, pq: pgqueue.PgQueue) -> None:
    pq.enqueue("t", ["secret"], queue="q", headers={"token": "secret"})
    pq.fail(pq.claim("q"), pgqueue.DeadLetter("secret"))
    pq.enqueue("t", ["secret"], queue="q", headers={"token": "secret"})
    pq.add_schedule("s", "t", every=60, args=["secret"], headers={"token": "secret"})
    with acting(database, prefix, "reader") as reader:
        assert reader.status()[0].ready == 1
        assert reader.workers() == []
        [job], [letter] = reader.jobs(), reader.dead_letters()
        assert (job.task, job.args_json, job.hidden) == ("t", None, True)
        assert (letter.task, letter.errors_json, letter.reason, letter.hidden) == ("t", None, "", True)
        assert reader.count_dead_letters() == 1
        assert [schedule.name for schedule in reader.schedules()] == ["s"]
        assert "secret" not in repr((job, letter, reader.schedules()))
        state = migrate.check(str(reader.settings.database_url)).state
        assert state is migrate.SchemaState.CURRENT
        hidden = [f"SELECT {name} FROM pgqueue.{table}" for table, names in PAYLOADS.items() for name in sorted(names)]
        refused(str(reader.settings.database_url), *hidden, "SELECT * FROM pgqueue.job", "COPY pgqueue.job TO STDOUT")


def test_a_reader_with_payloads_sees_them(database: str, prefix: str, pq: pgqueue.PgQueue) -> None:
    pq.enqueue("t", ["shown"], queue="q")
    pq.fail(pq.claim("q"), pgqueue.DeadLetter("shown"))
    pq.enqueue("t", ["shown"], queue="q")
    with acting(database, prefix, "reader", with_payloads=True) as reader:
        [job], [letter] = reader.jobs(), reader.dead_letters()
        assert (job.args_json, job.hidden, letter.args_json, letter.hidden) == ('["shown"]', False, '["shown"]', False)
        roles.create(database, prefix=prefix)
        assert reader.jobs()[0].hidden
        assert reader.dead_letters()[0].hidden


def test_a_reader_changes_nothing(database: str, prefix: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    job_id = pq.enqueue("t", queue="q")
    with acting(database, prefix, "reader", with_payloads=True) as reader:
        refused_calls(
            reader,
            {
                "job_enqueue needs INSERT on job, USAGE on job_id_seq": lambda: reader.enqueue("t", queue="q"),
                "job_cancel needs": lambda: reader.cancel(job_id),
                "INSERT on archive": lambda: reader.claim("q"),
                "queue_pause needs": lambda: reader.pause("q"),
                "queue_resume needs": lambda: reader.resume("q"),
                "schedule_add needs": lambda: reader.add_schedule("s", "t", every=60),
                "schedule_pause needs": lambda: reader.pause_schedule("s"),
                "queue_pause_task needs": lambda: reader.pause("q", task="t"),
                "queue_resume_task needs": lambda: reader.resume("q", task="t"),
                "queue_set_ageing needs": lambda: reader.set_queue("q", ageing=60),
                "job_expire needs": lambda: reader.expire("q"),
                "dead_redrive needs": reader.redrive,
                "dead_purge needs": reader.purge,
                "job_promote needs": lambda: reader.promote("q"),
                "job_rescue needs": lambda: reader.rescue("q"),
            },
        )
        refused(
            str(reader.settings.database_url),
            "UPDATE pgqueue.queue SET paused_at = NULL",
            "DELETE FROM pgqueue.worker",
            "SELECT nextval('pgqueue.job_id_seq')",
            "SELECT pgqueue.archive_roll('1 day')",
            "TRUNCATE pgqueue.dead_letter",
        )
    assert count(admin, "job") == 1


def test_without_the_right_to_make_roles_one_sentence_says_what_to_do(empty_database: str) -> None:
    with roles_of_test(empty_database) as prefix, login(empty_database) as owner:
        name = psycopg.conninfo.conninfo_to_dict(owner)["user"]
        execute(empty_database, f"CREATE SCHEMA pgqueue AUTHORIZATION {name}")
        migrate.upgrade(owner)
        with pytest.raises(pgqueue.SchemaError, match=f"lacks CREATEROLE.*CREATE ROLE {prefix}_worker NOLOGIN"):
            roles.create(owner, prefix=prefix)
        assert granted(empty_database, prefix) == {}
        assert not execute(empty_database, "SELECT FROM pg_roles WHERE rolname LIKE %s", f"{prefix}\\_%")
        for role in roles.names(prefix=prefix):
            execute(empty_database, f"CREATE ROLE {role} NOLOGIN")
        assert roles.create(owner, prefix=prefix).made == ()
        assert granted(empty_database, prefix)["job"]["worker"] == EVERYTHING


def test_an_owner_who_may_make_roles_needs_no_superuser(empty_database: str) -> None:
    with roles_of_test(empty_database) as prefix, login(empty_database, attributes="CREATEROLE") as owner:
        name = psycopg.conninfo.conninfo_to_dict(owner)["user"]
        execute(empty_database, f"CREATE SCHEMA pgqueue AUTHORIZATION {name}")
        migrate.upgrade(owner)
        assert len(roles.create(owner, prefix=prefix).made) == 3
        assert granted(empty_database, prefix)["job"]["worker"] == EVERYTHING
        drop_roles(empty_database, *roles.names(prefix=prefix))


def test_only_the_owner_grants(database: str, prefix: str) -> None:
    with (
        login(database, attributes="CREATEROLE") as guest,
        pytest.raises(pgqueue.SchemaError, match=r"holds no queue|lacks USAGE|no right|does not own"),
    ):
        roles.create(guest, prefix=prefix)
    with login(database, attributes="CREATEROLE") as guest:
        name = psycopg.conninfo.conninfo_to_dict(guest)["user"]
        execute(database, f"GRANT ALL ON SCHEMA pgqueue TO {name}")
        execute(database, f"GRANT ALL ON ALL TABLES IN SCHEMA pgqueue TO {name} WITH GRANT OPTION")
        sentence = r"does not own schema pgqueue, pgqueue.\w+.*only the role that migrates can grant"
        with pytest.raises(pgqueue.SchemaError, match=sentence):
            roles.create(guest, prefix=prefix)
    assert not execute(database, "SELECT FROM pg_roles WHERE rolname LIKE %s", f"{prefix}\\_%")


def test_without_a_queue_there_is_nothing_to_grant(empty_database: str) -> None:
    with pytest.raises(pgqueue.SchemaError, match="run `pgqueue migrate`"):
        roles.create(empty_database)


@pytest.mark.parametrize("prefix", ["", "Upper", 'a"b', "a b", "pg_mine", "x" * 41])
def test_a_prefix_that_is_no_plain_name_is_refused(prefix: str) -> None:
    with pytest.raises(pgqueue.ConfigurationError, match="prefix"):
        roles.names("pgqueue", prefix)
