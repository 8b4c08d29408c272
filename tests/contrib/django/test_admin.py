"""The queue in Django's admin: what is shown, what may be done and by whom, and that it stays fast."""

from __future__ import annotations

import json
import re
from typing import Any

import psycopg
import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

import pgqueue
from pgqueue.contrib.django import admin as queue_admin
from pgqueue.contrib.django import admin_actions
from pgqueue.ops.rescue import hasten
from tests.contrib.django.conftest import work
from tests.contrib.django.shop import tasks
from tests.workers import running

noop: Any = tasks.noop  # to mypy, what the framework's own decorator makes takes no options of ours
fails: Any = tasks.fails
JOBS, DEAD, WORKERS, SCHEDULES = (f"/admin/pgqueue/{name}/" for name in ("job", "deadletter", "worker", "schedule"))


def user_with(*codenames: str) -> Client:
    """A browser in which a member of the staff with these permissions has logged in."""
    user = User.objects.create_user(username="-".join(codenames) or "nobody", password="x", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def staff(shop: str) -> Client:
    """A browser in which somebody has logged in who may do everything."""
    client = Client()
    client.force_login(User.objects.create_superuser(username="root", password="x"))
    return client


def shown(client: Client, page: str) -> list[str]:
    """The first column of a list."""
    answer = client.get(page)
    assert answer.status_code == 200, answer
    return [str(row.pk) for row in answer.context["cl"].result_list]


def act(client: Client, page: str, action: str, *keys: Any, **more: str) -> Any:
    """Choose rows and an action."""
    return client.post(page, {"action": action, "_selected_action": [str(key) for key in keys], **more}, follow=True)


def messages(answer: Any) -> list[str]:
    return [str(message) for message in answer.context["messages"]]


def dead_jobs(pq: pgqueue.PgQueue, number: int) -> list[int]:
    ids = [int(fails.using(backend="default", max_attempts=1).enqueue().id) for _ in range(number)]
    work(pq, breaker_failures=0)
    return ids


def test_lists_show_what_there_is_and_pages_open(staff: Client, pq: Any) -> None:
    [dead] = dead_jobs(pq, 1)
    later = noop.using(delay=3600).enqueue(1, secret="<b>").id
    assert shown(staff, JOBS) == [later]
    assert shown(staff, DEAD) == [str(dead)]
    assert shown(staff, SCHEDULES) == ["tests.contrib.django.shop.tasks.nightly"]
    with running(pq, name="a worker to look at"):
        assert "a worker to look at" in staff.get(WORKERS).content.decode()
    for page in (f"{JOBS}{later}/change/", f"{DEAD}{dead}/change/"):
        text = staff.get(page).content.decode()
        assert "tests.contrib.django.shop.tasks." in text
        assert 'name="_save"' not in text
    assert "secret=&#x27;&lt;b&gt;&#x27;" in staff.get(f"{JOBS}{later}/change/").content.decode()
    assert "This Task failed due to ValueError" in staff.get(f"{DEAD}{dead}/change/").content.decode()
    assert staff.get(f"{SCHEDULES}tests.contrib.django.shop.tasks.nightly/change/").status_code == 200


def test_filters_and_search_find_jobs_by_state_queue_id_key_and_task(staff: Client, pq: Any) -> None:
    ready = tasks.noop.enqueue().id
    scheduled = tasks.send_receipt.using(delay=3600).enqueue(1).id
    first, blocked = (tasks.in_order.using(queue_name="lanes").enqueue("k", text).id for text in "ab")
    with running(pq, queues=("nothing",)):
        pq.claim("lanes", limit=1)
    running_now = str(pq.claim("default", limit=1)[0].id)
    assert running_now == ready
    assert shown(staff, f"{JOBS}?state=running") == [first, ready]
    assert shown(staff, f"{JOBS}?state=scheduled") == [scheduled]
    assert shown(staff, f"{JOBS}?state=blocked") == [blocked]
    assert shown(staff, f"{JOBS}?state=ready") == []
    assert shown(staff, f"{JOBS}?queue=mail") == [scheduled]
    assert shown(staff, f"{JOBS}?queue=%00") == []
    assert shown(staff, f"{JOBS}?queue=lanes&state=blocked") == [blocked]
    assert shown(staff, f"{JOBS}?q={scheduled}") == [scheduled]
    assert shown(staff, f"{JOBS}?q=shop.se") == [scheduled]
    assert shown(staff, f"{JOBS}?q=queue:mail") == [scheduled]
    assert shown(staff, f"{JOBS}?q=key:none") == []
    assert shown(staff, f"{JOBS}?q={'9' * 30}") == []
    assert shown(staff, f"{SCHEDULES}?paused=yes") == []
    assert shown(staff, f"{SCHEDULES}?q=nightly") != []
    assert shown(staff, f"{WORKERS}?q=nobody") == []


def test_a_list_is_not_asked_for_what_is_no_text_number_or_time(staff: Client, pq: Any) -> None:
    tasks.noop.enqueue(3)
    for query in ("args=3", "kwargs__exact=3", "headers=3", "errors__isnull=1"):
        assert staff.get(f"{JOBS}?{query}").status_code == 400, query
    assert staff.get(f"{SCHEDULES}?args=3").status_code == 400
    assert len(shown(staff, f"{JOBS}?queue__exact=default")) == 1


def test_a_cancellation_says_first_what_it_would_do_and_changes_nothing(staff: Client, pq: Any) -> None:
    running_now, waiting = int(tasks.noop.enqueue().id), int(noop.using(delay=60).enqueue().id)
    pq.claim("default")
    page = act(staff, JOBS, "cancel", running_now, waiting)
    assert "1 job would end at once as cancelled; 1 running job would be asked to stop." in page.content.decode()
    assert {job.id: job.cancel_requested for job in pq.jobs()} == {running_now: False, waiting: False}
    answer = act(staff, JOBS, "cancel", running_now, waiting, confirmed="yes")
    assert messages(answer) == ["1 job cancelled, 1 running job asked to stop."]
    assert {job.id: job.cancel_requested for job in pq.jobs()} == {running_now: True}


def test_a_retry_puts_what_waits_for_its_time_into_line(staff: Client, pq: Any) -> None:
    waiting, ready = int(noop.using(delay=3600).enqueue().id), int(tasks.noop.enqueue().id)
    page = act(staff, JOBS, "retry_now", waiting, ready)
    assert "1 job of 2 wait for a time and would be in line at once." in page.content.decode()
    assert messages(act(staff, JOBS, "retry_now", waiting, ready, confirmed="yes")) == ["1 job put into line."]
    assert {job.state for job in pq.jobs()} == {"ready"}


def test_what_waits_behind_the_running_job_of_its_key_is_shown_found_and_not_hurried(staff: Client, pq: Any) -> None:
    unique: Any = tasks.send_receipt.using(unique_key="receipts", on_conflict="replace")
    first = int(unique.enqueue(1).id)
    pq.claim("mail")
    second = int(unique.enqueue(2).id)
    assert second != first
    assert shown(staff, f"{JOBS}?q=key:receipts") == [str(second), str(first)]
    assert shown(staff, f"{JOBS}?state=scheduled") == [str(second)]
    assert ">scheduled<" in staff.get(f"{JOBS}?state=scheduled").content.decode()
    assert "receipts, behind the job that runs" in staff.get(f"{JOBS}{second}/change/").content.decode()
    assert messages(act(staff, JOBS, "retry_now", second, confirmed="yes")) == ["0 jobs put into line."]
    assert pq.run(hasten("mail", [second], channel=None)) == []
    assert pq.claim("mail") == []


def test_a_job_that_was_parked_by_hand_without_an_end_is_shown(staff: Client, admin: psycopg.Connection[Any]) -> None:
    admin.execute("INSERT INTO pgqueue.job (queue, task, position, run_at) VALUES ('q', 'work', NULL, 'infinity')")
    admin.execute("UPDATE pgqueue.job SET created_at = '-infinity'")
    [job] = shown(staff, f"{JOBS}?state=scheduled")
    assert ">scheduled<" in staff.get(JOBS).content.decode()
    assert staff.get(f"{JOBS}{job}/change/").status_code == 200


def test_dead_letters_are_redriven_and_purged_after_a_count(staff: Client, pq: Any) -> None:
    first, second, third = dead_jobs(pq, 3)
    page = act(staff, DEAD, "redrive", first, second)
    assert "2 dead letters would go back into their queues" in page.content.decode()
    assert pq.count_dead_letters() == 3
    assert messages(act(staff, DEAD, "redrive", first, confirmed="yes")) == ["1 dead letter redriven."]
    assert [job.id for job in pq.jobs()] == [first]
    # Across all pages, not only the ticked ones.
    page = act(staff, DEAD, "purge", second, select_across="1")
    assert "2 dead letters would be deleted for good." in page.content.decode()
    answer = act(staff, DEAD, "purge", second, select_across="1", confirmed="yes")
    assert messages(answer) == ["2 dead letters purged."]
    assert third not in [letter.id for letter in pq.dead_letters()]


def test_an_action_concerns_so_many_rows_at_most_and_says_so(
    staff: Client, pq: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_actions, "AT_ONCE", 2)
    ids = [int(tasks.noop.enqueue().id) for _ in range(3)]
    page = act(staff, JOBS, "cancel", *ids)
    assert "More than 2 are selected" in page.content.decode()
    [said] = messages(act(staff, JOBS, "cancel", *ids, confirmed="yes"))
    assert said.startswith("2 jobs cancelled, 0 running jobs asked to stop. There are more than 2")
    assert [job.id for job in pq.jobs()] == ids[2:]


def test_schedules_are_paused_resumed_and_run(staff: Client, pq: Any) -> None:
    work(pq)
    [name] = shown(staff, SCHEDULES)
    assert messages(act(staff, SCHEDULES, "pause", name)) == ["1 schedule paused."]
    assert shown(staff, f"{SCHEDULES}?paused=yes") == [name]
    assert messages(act(staff, SCHEDULES, "resume", name)) == ["1 schedule resumed."]
    assert messages(act(staff, SCHEDULES, "run_now", name)) == ["1 schedule run."]
    assert [job.task for job in pq.jobs()] == [name]


def test_permissions_decide_who_sees_who_acts_and_who_purges(shop: str, pq: Any) -> None:
    [dead] = dead_jobs(pq, 1)
    job = int(noop.using(delay=60).enqueue().id)
    stranger, viewer = user_with("view_order"), user_with("view_job", "view_deadletter")
    changer, deleter = user_with("change_job", "change_deadletter"), user_with("view_deadletter", "delete_deadletter")
    assert stranger.get(JOBS).status_code == 403
    for client, page, actions in (
        (viewer, JOBS, []),
        (viewer, DEAD, []),
        (changer, JOBS, ["cancel", "retry_now"]),
        (changer, DEAD, ["redrive"]),
        (deleter, DEAD, ["purge"]),
    ):
        answer = client.get(page)
        assert answer.status_code == 200
        form = answer.context["action_form"]
        offered = [name for name, _ in form.fields["action"].choices if name] if form else []
        assert offered == actions
    # What is not offered is not done either.
    act(viewer, JOBS, "cancel", job, confirmed="yes")
    act(changer, DEAD, "purge", dead, confirmed="yes")
    act(deleter, DEAD, "redrive", dead, confirmed="yes")
    assert [one.id for one in pq.jobs()] == [job]
    assert pq.count_dead_letters() == 1
    assert stranger.get(f"{JOBS}{job}/change/").status_code == 403


def test_no_form_changes_adds_or_deletes_a_row(staff: Client, pq: Any) -> None:
    job = noop.using(delay=60).enqueue().id
    assert staff.post(f"{JOBS}{job}/change/", {"task": "another"}).status_code == 403
    assert staff.get(f"{JOBS}add/").status_code == 403
    assert staff.post(f"{JOBS}{job}/delete/", {"post": "yes"}).status_code == 403
    assert "delete_selected" not in staff.get(JOBS).content.decode()
    assert [str(one.id) for one in pq.jobs()] == [job]


def test_lists_count_no_further_than_they_must(
    staff: Client, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No statement of a page visits more rows than the count's bound, whatever is in the table."""
    monkeypatch.setattr(queue_admin, "MOST", 500)
    monkeypatch.setattr(queue_admin, "WINDOW", 2_000)
    admin.execute("INSERT INTO pgqueue.job (queue, task) SELECT 'q', 'work' FROM generate_series(1, 100000)")
    admin.execute("INSERT INTO pgqueue.job (queue, task, priority) SELECT 'rare', 'rare', 0 FROM generate_series(1, 3)")
    admin.execute("VACUUM ANALYZE pgqueue.job")
    for query, rows in (
        ("", 501),
        ("?queue=q", 501),
        ("?queue=rare", 3),
        ("?state=running", 0),
        ("?q=rare", 3),
        ("?q=queue:rare", 3),
    ):
        with CaptureQueriesContext(connection) as queries:
            answer = staff.get(JOBS + query)
        assert answer.context["cl"].result_count == rows, query
        looked_at = [one["sql"] for one in queries if '"pgqueue"."job"' in one["sql"]]
        assert looked_at
        assert all(visited(admin, statement) <= 5_000 for statement in looked_at), (query, looked_at)


def visited(admin: psycopg.Connection[Any], statement: str) -> int:
    """The rows that the scans of a statement have looked at, those that a filter threw away included."""
    plan = admin.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}".encode()).fetchone()
    assert plan is not None
    numbers = re.findall(r'"(?:Actual Rows|Rows Removed by Filter)": ([\d.]+)', json.dumps(plan[0]))
    return int(max(map(float, numbers), default=0))
