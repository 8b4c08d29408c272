"""The nemesis: what goes wrong, in an order and with choices that follow from the seed alone."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg

import pgqueue
from pgqueue.errors import PgQueueError
from tests.chaos.proxy import Proxy
from tests.history.app import QUEUE
from tests.history.fleet import LEAVING, Fleet, Post
from tests.history.lane_record import UNPARKING
from tests.history.record import ASKED
from tests.history.server import PrivateServer, rows
from tests.waiting import wait_until

AWAY = (psycopg.Error, PgQueueError)
SECONDS = {
    "kill": 1.0, "freeze": 3.5, "leave": 3.0, "terminate": 0.5, "restart": 3.0, "crash": 3.0, "lose a backend": 2.0,
    "stall": 3.5, "cut to the server": 3.0, "cut to the client": 3.0, "drop": 0.5, "lose replies": 2.0, "refuse": 2.0,
    "fill": 2.0, "cancel": 0.3, "redrive": 0.3, "unpark": 0.3, "skew": 1.0, "stall producers": 1.0,
}  # fmt: skip
"""How long each strike takes, about."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault: `at` seconds after the beginning, for `seconds`; `dice` makes its choices."""

    at: float
    name: str
    seconds: float
    dice: int

    def __str__(self) -> str:
        return f"{self.at:6.1f} s  {self.name} ({self.seconds:.1f} s, dice {self.dice})"


def schedule(seed: int, seconds: float, names: Collection[str]) -> list[Strike]:
    """The strikes of a run: every one of `names` in turn, in a new order each time."""
    dice = random.Random(f"nemesis of {seed}")
    strikes: list[Strike] = []
    at = 1.0
    while True:
        for name in dice.sample(sorted(names), len(names)):
            lasts = SECONDS[name] * dice.uniform(0.8, 1.3)
            if at + lasts > seconds:
                return strikes
            strikes.append(Strike(at, name, lasts, dice.getrandbits(30)))
            at += lasts + dice.uniform(0.1, 0.6)


def faketime() -> Path | None:
    """The library that gives a process another clock, if this machine has it."""
    given = os.environ.get("PGQUEUE_TEST_FAKETIME")
    if given:
        return Path(given)
    # The variant for programs with threads first.
    found = [
        *Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"),
        *Path("/usr/lib").glob("*/faketime/libfaketime.so.1"),
    ]
    return found[0] if found else None


class Nemesis(threading.Thread):
    """Strikes by the schedule, one after the other. `error` is what went wrong with itself."""

    def __init__(
        self,
        strikes: Sequence[Strike],
        fleet: Fleet,
        producers: Proxy,
        server: PrivateServer,
        url: str,
        spare: int = -1,
    ) -> None:
        super().__init__(name="nemesis", daemon=True)
        self.strikes = strikes
        self.fleet = fleet
        self.producers = producers
        self.server = server
        self.url = url
        self.spare = spare
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self.done: list[Strike] = []
        self.complaints: list[str] = []
        self.crashes: list[datetime] = []
        self.operator = pgqueue.PgQueue(url, connect_timeout=2.0)
        self._dice = random.Random()

    def run(self) -> None:
        """To the end of the schedule, or until stopped; everything is repaired behind each strike."""
        began = time.monotonic()
        try:
            for strike in self.strikes:
                if self.stopping.wait(max(0.0, began + strike.at - time.monotonic())):
                    return
                self._dice = random.Random(strike.dice)
                self._deed(strike.name)(strike.seconds)
                self.done.append(strike)
        except BaseException as error:
            self.error = error
        finally:
            self.operator.close()

    def owes(self) -> set[str]:
        """What is in the schedule and has not come yet."""
        return {strike.name for strike in self.strikes} - {strike.name for strike in list(self.done)}

    def _deed(self, name: str) -> Callable[[float], None]:
        deeds: dict[str, Callable[[float], None]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "leave": self._leave,
            "terminate": self._terminate,
            "restart": lambda _: self.server.restart(signal.SIGINT),
            "crash": self._crash,
            "lose a backend": self._lose_a_backend,
            "stall": lambda seconds: self._network(lambda proxy: proxy.stall(), seconds),
            "cut to the server": lambda seconds: self._network(lambda proxy: proxy.cut("to_server"), seconds),
            "cut to the client": lambda seconds: self._network(lambda proxy: proxy.cut("to_client"), seconds),
            "drop": lambda _: self._victims()[0].proxy.drop_all(),
            "lose replies": self._lose_replies,
            "refuse": self._refuse,
            "fill": self._fill,
            "cancel": self._cancel,
            "redrive": self._redrive,
            "unpark": self._unpark,
            "skew": self._skew,
            "stall producers": self._stall_producers,
        }
        return deeds[name]

    def _victims(self, killing: bool = False) -> list[Post]:
        """Workers in the order in which they are hit: first those that are up. The spared one is not killed."""
        posts = [post for post in self.fleet.posts if not (killing and post.number == self.spare)]
        return sorted(self._dice.sample(posts, len(posts)), key=lambda post: not post.up)

    def _pause(self, seconds: float) -> None:
        self.stopping.wait(seconds)

    # Workers.

    def _kill(self, seconds: float) -> None:
        victim = self._victims(killing=True)[0]
        victim.skew = ""
        victim.signal(signal.SIGKILL, provoked=True)

    def _leave(self, seconds: float) -> None:
        victim = self._victims(killing=True)[0]
        process = victim.process
        if process is None or not victim.up:
            return
        victim.signal(signal.SIGTERM, provoked=True)
        try:
            wait_until(lambda: process.poll() is not None, LEAVING, "it has left")
        except AssertionError:
            self.complaints.append(f"worker {victim.number} does not leave:\n{victim.tail()}")
            victim.signal(signal.SIGKILL)

    def _skew(self, seconds: float) -> None:
        victim = self._victims(killing=True)[0]
        victim.skew = self._dice.choice(["+3600", "-3600", "+86400"])
        victim.signal(signal.SIGKILL, provoked=True)

    def _freeze(self, seconds: float) -> None:
        victim = self._victims()[0]
        process = victim.process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGSTOP)
        self._pause(seconds)
        process.send_signal(signal.SIGCONT)

    # The network.

    def _network(self, fault: Callable[[Proxy], None], seconds: float) -> None:
        # Nearly always some see it and some do not: those take over.
        victims = self._victims()[: self._dice.choice([1, 1, 2, len(self.fleet.posts)])]
        for victim in victims:
            fault(victim.proxy)
        self._pause(seconds)
        for victim in victims:
            victim.proxy.resume()

    def _lose_replies(self, seconds: float) -> None:
        for proxy in (self._victims()[0].proxy, self.producers):
            proxy.drop_next_replies(self._dice.randint(2, 8))
        self._pause(seconds)
        for proxy in (*(post.proxy for post in self.fleet.posts), self.producers):
            proxy.drop_next_replies(0)

    def _refuse(self, seconds: float) -> None:
        proxy = self._victims()[0].proxy
        proxy.refuse()
        proxy.drop_all()
        self._pause(seconds)
        proxy.resume()

    def _stall_producers(self, seconds: float) -> None:
        self.producers.stall()
        self._pause(seconds)
        self.producers.drop_all()  # a commit may have been sent, and its answer will never come
        self.producers.resume()

    # The server.

    def _backends(self) -> list[int]:
        found = rows(
            self.url,
            "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND datname = current_database()"
            " AND pid <> pg_backend_pid() ORDER BY pid",
        )
        return [pid for (pid,) in found or ()]

    def _terminate(self, seconds: float) -> None:
        backends = self._backends()
        for pid in self._dice.sample(backends, min(len(backends), self._dice.choice([1, 3, 10, 1000]))):
            rows(self.url, "SELECT pg_terminate_backend(%s)", pid)

    def _crash(self, seconds: float) -> None:
        self.crashes.append(datetime.now(UTC))
        self.server.restart(signal.SIGQUIT)

    def _lose_a_backend(self, seconds: float) -> None:
        """One of the server's processes is killed: it ends all the others, and recovers."""
        backends = self._backends()
        if backends:
            self.crashes.append(datetime.now(UTC))
            with suppress(ProcessLookupError):
                os.kill(self._dice.choice(backends), signal.SIGKILL)
        wait_until(self.server.accepts, 60.0, "the server has recovered")

    def _fill(self, seconds: float) -> None:
        with ExitStack() as stack:
            with suppress(psycopg.OperationalError):
                for _ in range(300):
                    stack.enter_context(psycopg.connect(self.url, autocommit=True, connect_timeout=2))
            self._pause(seconds)

    # Operators.

    def _cancel(self, seconds: float) -> None:
        live = [job_id for (job_id,) in rows(self.url, "SELECT id FROM pgqueue.job ORDER BY id LIMIT 200") or ()]
        chosen: list[Any] = self._dice.sample(live, min(len(live), 5))
        if all(rows(self.url, ASKED, job_id) is not None for job_id in chosen):
            with suppress(*AWAY):
                self.operator.cancel(chosen)

    def _redrive(self, seconds: float) -> None:
        with suppress(*AWAY):
            self.operator.redrive(limit=20)

    def _unpark(self, seconds: float) -> None:
        with suppress(*AWAY):
            unpark(self.operator, self.url)


def unpark(operator: pgqueue.PgQueue, url: str) -> None:
    """Let every parked key go on, without what has parked it."""
    for lane in operator.lanes(QUEUE, limit=1000):
        if lane.parked_at is not None and rows(url, UNPARKING, f"o{lane.key}") is not None:
            operator.unpark(QUEUE, lane.key)
