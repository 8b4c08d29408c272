"""dumpdata and loaddata: the queue is no data that could be written back."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import NotSupportedError

from pgqueue.contrib.django.models import Job
from tests.contrib.django.shop import tasks
from tests.contrib.django.shop.models import Note


def dumped(*words: str, **options: Any) -> list[str]:
    out = io.StringIO()
    call_command("dumpdata", *words, stdout=out, **options)
    return [row["model"] for row in json.loads(out.getvalue())]


def test_a_dump_leaves_the_queue_out(pq: Any) -> None:
    Note.objects.create(text="kept")
    tasks.noop.enqueue("secret")
    found = dumped()
    assert "shop.note" in found
    assert not [model for model in found if model.startswith("pgqueue")]
    assert dumped("shop", exclude=["shop.order"]) == ["shop.note"]
    for label in ("pgqueue", "pgqueue.Job"):
        with pytest.raises(CommandError, match="the queue is not dumped"):
            dumped(label)


def test_what_was_dumped_otherwise_is_not_loaded(pq: Any, tmp_path: Path) -> None:
    row = {"model": "pgqueue.job", "pk": 1, "fields": {"queue": "default", "task": "shop.send", "args": None}}
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    with pytest.raises(NotSupportedError, match="loaddata --exclude pgqueue"):
        call_command("loaddata", str(tmp_path / "rows.json"), verbosity=0)
    call_command("loaddata", str(tmp_path / "rows.json"), exclude=["pgqueue"], verbosity=0)
    with pytest.raises(NotSupportedError, match="nothing is saved through the models of pgqueue"):
        Job(id=1, queue="default", task="shop.send").save()
    assert pq.jobs() == []
