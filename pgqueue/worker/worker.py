"""The worker: control loops on their own connections, runners for the work, and the order in which all of it ends."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pgqueue import log
from pgqueue.core import Core
from pgqueue.errors import ConfigurationError, LeaseLost, SchemaError
from pgqueue.events import EventName
from pgqueue.failure import one_line
from pgqueue.job import Job
from pgqueue.ops import claim as claim_ops
from pgqueue.ops import result as result_ops
from pgqueue.ops import worker as worker_ops
from pgqueue.outcome import RELEASED
from pgqueue.worker import places, platform, topics
from pgqueue.worker.batch_call import given_back
from pgqueue.worker.breaker import Breaker
from pgqueue.worker.children import ChildRunner
from pgqueue.worker.claimer import Claimer
from pgqueue.worker.coroutines import CoroutineRunner
from pgqueue.worker.desk import Desk
from pgqueue.worker.execution import tell_missing
from pgqueue.worker.fence import Fence
from pgqueue.worker.fitness import Verdict
from pgqueue.worker.heartbeat import Heartbeat
from pgqueue.worker.ledger import Held, Ledger, Phase
from pgqueue.worker.link import Link, Watchdog
from pgqueue.worker.listener import Ears, Listener
from pgqueue.worker.loop import Loop
from pgqueue.worker.maintenance import Maintenance, unfit_schema
from pgqueue.worker.options import WorkerOptions
from pgqueue.worker.reporter import Reporter
from pgqueue.worker.settler import Settler
from pgqueue.worker.threads import ThreadRunner
from pgqueue.worker.ticker import Ticker
from pgqueue.worker.timeouts import Timeouts

LEAVING = 1.8
"""Seconds after the end of the grace time for the last settles and releases, and for whatever hangs on a dead network."""
LOOPS_END, LAST_BEAT, LAST_ROW = 0.5, 0.2, 0.3
"""What the loops that only bring work get of it, the last heartbeat, and the deletion of the worker's row."""
UNFIT = 70
"""The exit status of a worker on which everything fails while others work: EX_SOFTWARE of sysexits.h."""
STUCK = 75
"""The exit status of a worker with too many threads past their timeout: EX_TEMPFAIL, start it again."""
CHILDREN_END = 0.4
"""Seconds until the children that were killed are gone: they have nothing to say in it."""


class Worker:
    """Runs the jobs of an application's tasks until it is stopped.

    `run()` blocks and returns the exit status: 0 after a stop or a drain, 1 when a part of the worker broke for good, 70
    when everything failed here while other workers completed jobs of the same queues, 75 when too many threads are stuck
    past their timeout: end the process then, since only that ends them.
    `stop()` may be called from any thread: the first call ends the worker gracefully, the second at once (what runs is
    released, not lost). From a signal handler only when `run()` is in another thread: a handler interrupts the main thread
    wherever it is, inside `run()` too.
    """

    def __init__(self, app: Core, options: WorkerOptions) -> None:
        self.app = app
        self.options = options
        self.queues = list(options.queues) if options.queues else app.tasks.queues()
        if not self.queues:
            raise ConfigurationError("no queues to serve: the application registers no task, and --queues names none")
        self.events = app.events
        self.ledger = Ledger()
        self.watchdog = Watchdog()
        self.started = threading.Event()
        self.exit_status = 0
        self._stop = threading.Event()
        self._now = threading.Event()
        self._control_lock = threading.Lock()
        self._listener: Listener | None = None
        self._identity = options.identity(self.queues)
        self._places = places.Places(app)

    def run(self) -> int:
        """Work until stopped. DatabaseUnavailable or SchemaError when it cannot begin."""
        if places.importing:
            raise ConfigurationError(
                'importing the application starts a worker: put its start below `if __name__ == "__main__":`'
            )
        self.watchdog.start()
        self._control = self._link()
        self._register()
        self._build()
        self._start()
        self.events.emit(
            EventName.WORKER_STARTED, worker=self.worker_id, queues=self.queues, concurrency=self.options.concurrency
        )
        if missing := platform.lacks():
            log.say(log.NO_CHILDREN, worker=self.worker_id, missing=missing)
        self.started.set()
        self._stop.wait()
        self._shut_down()
        return self.exit_status

    def _register(self) -> None:
        try:
            if unfit := unfit_schema(self._control):
                raise SchemaError(unfit)
            self._control.run(result_ops.declare({name: task.keeps for name, task in self.app.tasks.items()}))
            self._control.run(self.app.declare_limits_op())
            topics.define_at_start(self._control, self.app.code_subscriptions, self.app.channel, self.events)
            self.worker_id = self._control.run(worker_ops.register(self._identity))
        except BaseException:
            self._control.close()
            self.watchdog.stop()
            raise

    def stop(self) -> None:
        """Graceful at the first call, at once at the second."""
        if self._stop.is_set():
            self._now.set()
        self._stop.set()

    # Building

    def _link(self, url: str | None = None) -> Link:
        return Link(self.app.settings, self.watchdog, self.options.deadline, url=url)

    def _build(self) -> None:
        app, options, events, fatal = self.app, self.options, self.events, self._fatal
        self.settler = Settler(self._link(), self.ledger, events, app.settle_options, fatal)
        self.breaker = Breaker(self.queues, self.ledger, events, options, self.settler.submit)
        self.claimer = Claimer(
            self._link(),
            self.queues,
            app.tasks,
            self.ledger,
            events,
            options,
            self.worker_id,
            settler=self.settler,
            breaker=self.breaker,
            drained=self.stop_once,
            hearing=self._hearing,
            channel=app.channel,
            fatal=fatal,
        )
        self.settler.relieved, self.settler.freed = self.claimer.relieved, self.claimer.admit
        self.settler.written = self.claimer.settled
        self.settler.decided = functools.partial(self.breaker.finish, settled=True)
        self.reporter = Reporter(self._link(), events, fatal)
        shared: dict[str, Any] = {
            "concurrency": options.concurrency,
            "finish": self.breaker.finish,
            "finish_call": self.breaker.finish_call,
            "extend": self._extend,
            "hungry": self.claimer.hungry,
            "doubt": self.settler.doubt,
            "desk": self._desk(),
        }
        self.threads = ThreadRunner(app.tasks, self.ledger, events, **shared)
        self.coroutines = CoroutineRunner(app.tasks, self.ledger, events, **shared)
        self.children = ChildRunner(self._places, app.tasks, self.ledger, events, **shared)
        self.timeouts = Timeouts(self.threads, events, too_many=self._too_many_stuck, fatal=fatal)
        self.claimer.threads, self.claimer.coroutines = self.threads, self.coroutines
        self.claimer.children = self.children
        self.fence = Fence(self.ledger, events, options.lease, tell=self._tell, fatal=fatal)
        self._build_heartbeat()
        self._helpers = self._build_helpers()

    def _desk(self) -> Desk:
        self.desk = Desk(
            self.app.settings,
            connections=self.options.concurrency,
            keeps=lambda job: None if (task := self.app.tasks.get(job.task)) is None else task.keeps,
            report=self.reporter.put,
            missing=functools.partial(tell_missing, self.events),
            app=self.app,
        )
        return self.desk

    def _build_heartbeat(self) -> None:
        self.heartbeat = Heartbeat(
            self._link(),
            self.ledger,
            self.events,
            self.options,
            self.worker_id,
            self._identity,
            tell=self._tell,
            inform=self._inform,
            lose=self.fence.lose,
            fitness=self.breaker.fitness,
            report=self._report,
            unfit=self._unfit,
            fatal=self._fatal,
        )
        self.breaker.opened, self.breaker.closed = self.heartbeat.ask, self._circuit_closed

    def _build_upkeep(self) -> Maintenance:
        app = self.app
        return Maintenance(
            self._link(),
            self.queues,
            app.settings,
            app.channel,
            self.options.lease,
            self.events,
            self.claimer.wake,
            self.claimer.admit,
            self.claimer.limit,
            app.declare_limits_op,
            self._hearing,
            self._fatal,
            app.code_subscriptions,
        )

    def _build_helpers(self) -> list[Loop]:
        """What a worker could do without for a while: upkeep, and the ears."""
        app, wake = self.app, self.claimer.wake
        upkeep = self._build_upkeep()
        helpers: list[Loop] = [upkeep]
        ticker: Ticker | None = None
        if self.options.schedules:
            ticker = Ticker(self._control, self._control_lock, app, wake=wake, hearing=self._hearing, fatal=self._fatal)
            helpers.append(ticker)
        if self._control.pooled:
            listens = bool(app.channel and app.settings.listen_url)
            self.events.emit(EventName.WORKER_POOLED, worker=self.worker_id, listens=listens)
        self.settler.succeeded = upkeep.poke  # what waits behind a superseded job may go on
        # Through a pooler LISTEN would stay behind, in a session that serves others; listen_url says that it is safe.
        if not app.channel or (self._control.pooled and not app.settings.listen_url):
            return helpers
        link, queues = self._link(app.settings.listen_url), frozenset(self.queues)
        ears = Ears(
            ready=wake,
            due=upkeep.poke,
            keys=self.claimer.admit,
            cancelled=self.heartbeat.ask,
            say_hello=self._say_hello,
            schedules=(ticker or upkeep).poke,
            topics=upkeep.poke_topics,
        )
        self._listener = Listener(link, app.channel, queues, self.worker_id, self.events, ears, self._fatal)
        return [*helpers, self._listener]

    def _hearing(self) -> bool:
        return self._listener is not None and self._listener.hearing

    def _say_hello(self) -> None:
        with self._control_lock:
            self._control.run(worker_ops.hello(self.app.settings.schema, self.worker_id))

    def _start(self) -> None:
        self.settler.start()
        self.fence.start()
        self.heartbeat.start()
        self.timeouts.start()
        self.threads.start()
        self.coroutines.start()
        for helper in self._helpers:
            helper.start()
        self.claimer.start()

    def stop_once(self) -> None:
        """Begin the graceful end, unless it has begun."""
        self._stop.set()

    def _fatal(self, loop: str, error: BaseException) -> None:
        self.exit_status = 1
        self.events.emit(
            EventName.WORKER_FAILED,
            worker=self.worker_id,
            loop=loop,
            error=type(error).__name__,
            detail=one_line(str(error)),
        )
        if loop in (Heartbeat.name, Fence.name):
            self._now.set()  # without heartbeats, and their fence, nothing that runs may go on
        self.stop_once()

    def _report(self) -> worker_ops.Report:
        return worker_ops.Report(completed=dict(self.settler.completed), circuits=self.breaker.report())

    def _circuit_closed(self) -> None:
        self.heartbeat.ask()
        self.claimer.wake()

    def _unfit(self, verdict: Verdict) -> None:
        if not self._stop.is_set():
            self.exit_status = UNFIT
            self.events.emit(EventName.WORKER_UNFIT, worker=self.worker_id, **dataclasses.asdict(verdict))
            self.stop_once()

    def _too_many_stuck(self, stuck: int) -> None:
        self.exit_status = self.exit_status or STUCK
        self.events.emit(EventName.WORKER_STUCK, worker=self.worker_id, stuck=stuck)
        self.stop_once()

    def _inform(self, held: Held) -> None:
        self.claimer.batches.cancel(held)
        self.children.cancel(held)

    def _tell(self, held: Held) -> None:
        """Something has happened to a job that runs."""
        self.claimer.batches.cancel(held)
        self.coroutines.cancel(held)
        self.children.cancel(held)

    def _extend(self, job: Job, seconds: float) -> None:
        with self._control_lock:
            sent = time.monotonic()
            held = self._control.run(claim_ops.extend(job.queue, [(job.id, job.token)], lease=seconds))
        if job.id not in held:
            raise LeaseLost([job])
        self.ledger.renew([job.token], sent + seconds)

    # The end: stop claiming, release what has not started, drain with heartbeats on, settle, deregister, close.

    def _shut_down(self) -> None:
        began = time.monotonic()
        self.events.emit(EventName.WORKER_STOPPING, worker=self.worker_id, held=len(self.ledger))
        self.claimer.stop()
        for part in self._helpers:
            part.stop()
        self._release(Phase.WAITING)
        self.children.stop()
        self._wait_for_handlers(began + self.options.grace)
        end = time.monotonic() + LEAVING
        for part in (self.claimer, *self._helpers):
            part.join(end - LEAVING + LOOPS_END - time.monotonic())
        self.children.give_back(CHILDREN_END)
        self._release(Phase.WAITING, Phase.RUNNING)
        self.children.stop()
        self.settler.stop()
        self.settler.join(end - LAST_BEAT - LAST_ROW - time.monotonic())
        self.threads.stop()
        self.coroutines.stop()
        self.coroutines.join(max(0.0, min(0.2, end - LAST_BEAT - LAST_ROW - time.monotonic())))
        self.children.join(max(0.0, end - LAST_BEAT - LAST_ROW - time.monotonic()))
        self.timeouts.stop()
        self.reporter.stop()
        self.reporter.join(max(0.0, min(LAST_BEAT, end - LAST_BEAT - LAST_ROW - time.monotonic())))
        self._last_writes(end)
        self.events.emit(
            EventName.WORKER_STOPPED,
            worker=self.worker_id,
            settled=self.settler.settled,
            seconds=time.monotonic() - began,
        )

    def _release(self, *phases: Phase) -> None:
        # What cannot be stopped is not given back, or two attempts would overlap: its lease ends after this process has.
        kept = {*self.threads.stuck(), *self.children.held()} if Phase.RUNNING in phases else set()
        for held in self.ledger.take_all(*phases, but=kept):
            if held.current is not None:
                held.current.cancel()
                self._tell(held)
                if held.current.settled:
                    self.settler.doubt(held, RELEASED)
                    continue
            self.settler.submit(held, given_back(held, self.app.tasks.get(held.job.task), self.desk))

    def _wait_for_handlers(self, end: float) -> None:
        """Until nothing is held any more, the grace time is over, or a second stop came. Late claims are given back by the
        claimer itself."""
        while self._awaited() and time.monotonic() < end and not self._now.is_set():
            self._now.wait(0.02)

    def _awaited(self) -> int:
        """How many jobs the end waits for. Too many stuck ones are the reason for it, and not waited for."""
        return len(self.ledger) - (len(self.threads.stuck()) if self.exit_status == STUCK else 0)

    def _last_writes(self, end: float) -> None:
        """Bounded: a server that does not answer must not keep the process from leaving; leases cover the rest."""
        self.heartbeat.stop()
        self.heartbeat.join(max(LAST_BEAT, end - LAST_ROW - time.monotonic()))  # its last beat would bring the row back
        self.fence.stop()
        self._bounded(self._leave, max(LAST_ROW, end - time.monotonic()))
        self._bounded(self.desk.close, max(0.0, end - time.monotonic()))
        self.watchdog.stop()

    def _leave(self) -> None:
        with self._control_lock:
            self._control.run(worker_ops.leave(self.worker_id))
            self._control.close()

    @staticmethod
    def _bounded(work: Callable[[], object], seconds: float) -> None:
        def guarded() -> None:
            with suppress(Exception):  # the row of a worker that left is pruned by others
                work()

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        thread.join(seconds)
