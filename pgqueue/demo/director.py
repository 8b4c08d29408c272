"""The order of events: record uploads, start workers, kill one, wait for the others, add everything up."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg

from pgqueue.demo import display as displays
from pgqueue.demo import photographs, stage
from pgqueue.demo.audit import Audit, read_stories
from pgqueue.demo.display import Counter, Display
from pgqueue.demo.errors import DemoError
from pgqueue.demo.sheet import contact_sheet
from pgqueue.demo.workers import LEASE, Killed, Workers
from pgqueue.migrate_connection import translated_errors

PATIENCE = 120.0
LOOK_EVERY = 0.1
MARKER = ".pgqueue-demo"
PROGRESS = f"""
    SELECT (SELECT count(*) FROM {stage.QUEUE_SCHEMA}.archive) + (SELECT count(*) FROM {stage.QUEUE_SCHEMA}.dead_letter),
           ARRAY(SELECT (args ->> 0)::bigint FROM {stage.QUEUE_SCHEMA}.job WHERE lost > 0)
"""  # noqa: S608 - the schema is a constant


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the command was asked for."""

    images: Path | None
    uploads: int
    workers: int
    output: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What was uploaded: how many files, how many of them broken, and the number that the rolled-back one had."""

    uploads: int
    broken: int
    rolled_back: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Props:
    """What is needed before a database is: the photographs, and an empty folder for the results."""

    photographs: list[Path]
    output: Path

    @property
    def thumbnails(self) -> Path:
        """Where the workers put thumbnails."""
        return self.output / "thumbnails"

    @property
    def sheet(self) -> Path:
        """The contact sheet."""
        return self.output / "contact-sheet.png"

    @property
    def logs(self) -> Path:
        """What the workers print."""
        return self.output / "logs"


def prepare(plan: Plan, display: Display) -> Props:
    """Find the photographs and make room for the results. DemoError says what is missing or in the way."""
    return Props(photographs=_photographs(plan, display), output=_clean_output(plan.output))


def play(plan: Plan, props: Props, database_url: str, display: Display) -> Audit:
    """Run the demo, and read back what became of everything. DemoError when it cannot be run to its end."""
    settings = stage.environment(database_url, props.thumbnails)
    app = stage.load_app(settings)
    with translated_errors(database_url, stage.QUEUE_SCHEMA), stage.clean_stage(database_url) as connection:
        connection.execute(app.TABLES)
        recorded = _record(app, connection, props.photographs, plan.uploads, display)
        with Workers(plan.workers, environment=settings, logs=props.logs) as workers:
            killed = _work(workers, connection, recorded.uploads, display)
        return Audit(
            recorded=recorded.uploads,
            broken=recorded.broken,
            rolled_back=recorded.rolled_back,
            killed=killed,
            stories=read_stories(connection),
            thumbnails=props.thumbnails,
        )


def report(audit: Audit, plan: Plan, props: Props, display: Display, began: float) -> None:
    """Print the table, draw the contact sheet. DemoError names the first sum that does not agree."""
    contact_sheet(audit, props.sheet)
    display.table(displays.sums(audit, workers=plan.workers, seconds=time.monotonic() - began))
    complaint = audit.complaint()
    if complaint is not None:
        raise DemoError(f"The sums do not agree: {complaint}")
    display.say(f"contact sheet  {props.sheet}")
    display.say(f"thumbnails     {props.thumbnails}")
    display.say(f"worker logs    {props.logs}")
    display.say("All sums agree.")


def _photographs(plan: Plan, display: Display) -> list[Path]:
    if plan.images is None:
        pictures = photographs.sample_photographs()
        display.say(f"{len(pictures)} sample photographs: {', '.join(picture.name for picture in pictures)}")
    else:
        pictures = photographs.photographs_in(plan.images, plan.uploads)
        display.say(f"{len(pictures)} photographs in {plan.images}")
    return pictures


def _clean_output(output: Path) -> Path:
    """The folder for the results, empty. Only a folder that an earlier demo made is emptied."""
    output = output.resolve()
    marker = output / MARKER
    try:
        if output.exists() and not marker.exists() and any(output.iterdir()):
            raise DemoError(f"--output {output}: this folder holds something else; name a new or an empty one.")
        output.mkdir(parents=True, exist_ok=True)
        marker.write_text("`pgqueue demo` made this folder and empties it at every run.\n")
        for folder in ("thumbnails", "logs"):
            shutil.rmtree(output / folder, ignore_errors=True)
            (output / folder).mkdir()
        (output / "contact-sheet.png").unlink(missing_ok=True)
    except OSError as error:
        raise DemoError(f"--output {output}: {(error.strerror or 'it cannot be used').lower()}.") from None
    return output


def _record(
    app: ModuleType, connection: psycopg.Connection[Any], pictures: list[Path], count: int, display: Display
) -> Recorded:
    broken = rolled_back = 0
    with display.counter("uploads recorded", count) as counter:
        for number, upload in enumerate(photographs.uploads(pictures, count), 1):
            if upload.broken:
                broken += 1
                # In the middle of everything, one transaction that records an upload and its job is given up.
                rolled_back = _roll_back(app, connection, upload)
            app.upload(connection, upload.name, upload.content)
            counter.to(number)
    display.say(f"{count} uploads recorded, each with its job in one transaction; {broken} is a file cut in half")
    display.say("1 more was rolled back: it must leave neither a row nor a job")
    return Recorded(uploads=count, broken=broken, rolled_back=rolled_back)


def _roll_back(app: ModuleType, connection: psycopg.Connection[Any], upload: photographs.Upload) -> int:
    with connection.transaction(force_rollback=True):
        number = app.upload(connection, f"{upload.name}, second thoughts", upload.content)
    return int(number)


def _work(workers: Workers, connection: psycopg.Connection[Any], total: int, display: Display) -> Killed:
    display.say(f"{workers.count} workers started, with a lease of {LEASE:g} s")
    with display.counter("jobs settled", total) as counter:
        killed = workers.kill_one_with_jobs(connection)
        held = ", ".join(map(str, killed.held))
        display.say(f"worker {killed.number} (pid {killed.pid}) killed with SIGKILL while it held uploads {held}")
        _wait(workers, killed, connection, display, counter)
    return killed


def _wait(
    workers: Workers, killed: Killed, connection: psycopg.Connection[Any], display: Display, counter: Counter
) -> None:
    """Until the other workers have drained the queue and left. Nothing new is started."""
    began, rescued = time.monotonic(), set[int]()
    while workers.running():
        settled, lost = connection.execute(PROGRESS.encode()).fetchall()[0]
        if new := set(lost) - rescued:
            rescued |= new
            after = time.monotonic() - began
            display.say(f"uploads {', '.join(map(str, sorted(new)))} rescued {after:.1f} s after the kill")
        counter.to(settled)
        workers.check(killed)
        if time.monotonic() > began + PATIENCE:
            raise DemoError(f"The workers did not finish within {PATIENCE:.0f} s; their logs are in {workers.logs}.")
        time.sleep(LOOK_EVERY)
    workers.check(killed)
    counter.to(connection.execute(PROGRESS.encode()).fetchall()[0][0])
