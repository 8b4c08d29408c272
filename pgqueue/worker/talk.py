"""The conversation with a child process about one job, or about the jobs of one batch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from pgqueue.current import Stage
from pgqueue.errors import ConfigurationError, LeaseLost
from pgqueue.failure import one_line
from pgqueue.outcome import Outcome
from pgqueue.worker.channel import Message, read_outcome
from pgqueue.worker.child_process import ChildGone, ChildProcess
from pgqueue.worker.execution import heeding, tell_missing
from pgqueue.worker.ledger import Held, Phase

if TYPE_CHECKING:
    from pgqueue.worker.children import ChildRunner

BOOT = 120.0
"""Seconds that a child may take to import the application."""
UNWIND = 1.0
"""Seconds that an `async def` past its timeout, and a job whose lease is lost, get before their process is killed."""
Result = tuple[Outcome, str | None]
"""What came of a job, and the class of its error."""


class Talk:
    """`results`: what the child has said of each job, by its id. `sent`: the jobs that it was given."""

    def __init__(
        self, runner: ChildRunner, helds: Sequence[Held], *, batch: int | None = None, timeout: float | None = None
    ) -> None:
        self.runner = runner
        self.helds = helds
        self.task_name = helds[0].job.task
        self.began = False
        self.results: dict[int, Result] = {}
        self.sent: dict[int, Held] = {}
        self.batch = batch
        self._timeout = helds[0].job.timeout if batch is None else timeout
        self._told: set[int] = set()
        self._succeeded: set[int] = set()
        self._doomed = False
        self._end = time.monotonic() + BOOT
        self._why = ""

    def run(self, child: ChildProcess, place: Sequence[str]) -> bool:
        """Until there are outcomes of all, and whether the child should run no other job. ChildGone, or TimeoutError."""
        # The others have lost their lease while the child started.
        self.sent = {held.job.id: held for held in self.helds if held.phase is Phase.RUNNING}
        if not self.sent:
            return False
        task = self.runner.registry.get(self.task_name)
        child.send(
            jobs=[list(held.job) for held in self.sent.values()],
            batch=self.batch,
            timeout=self._timeout,
            place=list(place),
            memory_limit=None if task is None else task.defaults.memory_limit,
            keep=self._keep(),
        )
        self._limit(time.monotonic() + BOOT, "")
        while True:
            for message in self.listen(child):
                if "began" in message:
                    self.began = True
                    self._count_from_now(slack=UNWIND if task is not None and task.is_async else 0.0)
                elif "extend" in message:
                    child.send(extended=self._extend(message))
                elif "outcome" in message:
                    self._outcome(message)
                elif "settling" in message or "progress" in message or "missing" in message:
                    self._take(message)
                if "over" in message:
                    if len(self.results) < len(self.sent):
                        raise ChildGone("its process has not said what came of every job")
                    return bool(message.get("worn"))

    def listen(self, child: ChildProcess) -> list[Message]:
        """What the child says, or nothing when there is something else to see to."""
        if self.runner.giving_back:
            raise ChildGone("the worker stops")
        if self.began:
            self._pass_on(child)
        if time.monotonic() >= self._end:
            if self.began:
                raise TimeoutError(f"the job {self._why}: its process was killed")
            raise ChildGone(f"its process was not ready within {BOOT:g} s")
        return child.receive(self._end)

    def _pass_on(self, child: ChildProcess) -> None:
        news = [
            held
            for job_id, held in self.sent.items()
            if job_id not in self._told and (held.cancel_requested or held.phase is Phase.LOST)
        ]
        if news:
            self._told.update(held.job.id for held in news)
            child.send(cancel=[[held.job.id, held.job.token] for held in news])
        newer = [held for job_id, held in self.sent.items() if held.superseded and job_id not in self._succeeded]
        if newer:
            self._succeeded.update(held.job.id for held in newer)
            child.send(superseded=[[held.job.id, held.job.token] for held in newer])
        if not self._doomed and all(held.phase is Phase.LOST for held in self.sent.values()):
            self._doomed = True
            self._limit(min(self._end, time.monotonic() + UNWIND), "went on after its lease was lost")

    def _count_from_now(self, *, slack: float) -> None:
        timeout = self._timeout
        if timeout is None:
            self._limit(math.inf, "")
        else:
            self._limit(time.monotonic() + timeout + slack, f"ran for longer than its timeout of {timeout:g} s")

    def _limit(self, end: float, why: str) -> None:
        self._end, self._why = end, why

    def _of(self, message: Message) -> Held | None:
        """The job that this is about; None for what an earlier job has left behind, and for nonsense."""
        job_id = message.get("id")
        held = self.sent.get(job_id) if isinstance(job_id, int) else None
        return held if held is not None and message.get("token") == held.job.token else None

    def _extend(self, message: Message) -> str:
        held = self._of(message)
        if held is None:
            return "lost"
        try:
            self.runner.extend(held.job, float(message["extend"]))
        except LeaseLost:
            return "lost"
        except Exception as error:  # noqa: BLE001 - the handler gets it
            return one_line(f"{type(error).__name__}: {error!s}", 500)
        return ""

    def _keep(self) -> list[float] | None:
        task = self.runner.registry.get(self.task_name)
        if task is None or task.keeps is None:
            return None
        return [task.keeps, self.runner.desk.settings.max_result_bytes]

    def _take(self, message: Message) -> None:
        """What a job says of itself."""
        held = self._of(message)
        if held is None:
            return
        if "missing" in message:
            tell_missing(self.runner.events, held.job)
        elif "progress" in message and held.current is not None:
            with suppress(ConfigurationError, TypeError, ValueError):
                percent, text = message["progress"]
                self.runner.desk.progress(held.current, percent, text)
        else:
            _settling(held, message)

    def _outcome(self, message: Message) -> None:
        held = self._of(message)
        try:
            outcome = read_outcome(message["outcome"])
        except (ValueError, TypeError) as error:
            raise ChildGone("its process has said something that is no outcome") from error
        if held is None:
            raise ChildGone("its process has said something of a job that it was not given")
        _settling(held, message)
        for problem in message.get("problems") or ():
            self.runner.broken_policy(held, one_line(str(problem)))
        kind = message.get("error")
        self.results[held.job.id] = heeding(held, outcome), None if kind is None else one_line(str(kind))


def _settling(held: Held, message: Message) -> None:
    stage = str(message.get("settling"))
    if held.current is not None and stage in Stage.__members__:
        held.current.note(Stage[stage])
        held.current.frees = message.get("frees") is True
