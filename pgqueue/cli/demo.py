"""`pgqueue demo`: the example application, run with a worker killed in the middle of it."""

from __future__ import annotations

import importlib.util
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from pgqueue.worker import platform
from pgqueue.worker.processes import stop_signals


class Signalled(KeyboardInterrupt):
    """A signal asked the demo to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(demo)


def demo(
    context: typer.Context,
    images: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Photographs to upload.", show_default="sample photographs")
    ] = None,
    uploads: Annotated[int, typer.Option(metavar="N", min=4, max=1000, help="How many files to upload.")] = 40,
    workers: Annotated[
        int, typer.Option(metavar="N", min=2, max=20, help="How many workers to start; one is killed.")
    ] = 2,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where the thumbnails and the contact sheet go.")] = Path(
        "pgqueue-demo"
    ),
    database_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The database, instead of PGQUEUE_DATABASE_URL.", show_default=False),
    ] = None,
) -> None:
    """Upload photographs, make thumbnails, kill a worker, and add everything up.

    The example application of examples/avatars records each upload and enqueues its job in one transaction. One file is
    cut in half, one upload is rolled back, one worker is killed while it works. Exit status 0 says that every job is
    accounted for. In a database of yours, only the schemas pgqueue_demo and avatars_demo are touched.
    """
    platform.require_children("the demo, which kills a worker,")
    for number in stop_signals():
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _stop)
    url = database_url or getattr(context.obj, "database_url", None)
    try:
        _run(images, uploads, workers, output, url)
    except Signalled as stopped:
        typer.echo("pgqueue: the demo was stopped; its workers are ended", err=True)
        raise typer.Exit(128 + stopped.number) from None


def _run(images: Path | None, uploads: int, workers: int, output: Path, database_url: str | None) -> None:
    began = time.monotonic()
    from pgqueue import embedded
    from pgqueue.config import load_settings
    from pgqueue.demo.errors import extra_is_missing

    if importlib.util.find_spec("PIL") is None:
        raise extra_is_missing("Pillow")
    from pgqueue.demo.director import Plan, play, prepare, report
    from pgqueue.demo.display import Display

    display = Display()
    plan = Plan(images=images, uploads=uploads, workers=workers, output=output)
    props = prepare(plan, display)
    url = load_settings({"database_url": database_url}).database_url
    with ExitStack() as stack:
        if url is None:
            server = stack.enter_context(embedded.start())
            display.say(f"no database is configured: PostgreSQL {server.version} runs in {server.data.parent}")
            url = server.url
        stack.callback(_be_deaf)  # the end of the server is not to be interrupted
        audit = play(plan, props, url, display)
    report(audit, plan, props, display, began)


def _stop(number: int, frame: FrameType | None) -> None:
    """Ends the demo by way of every `finally`; a second signal does not disturb that."""
    _be_deaf()
    raise Signalled(number)


def _be_deaf() -> None:
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
