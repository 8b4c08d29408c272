"""What a worker and a child process say to each other: JSON objects, each after its length, over a socket pair.

| from the worker | |
|---|---|
| `hello` | what the child needs to be like its parent, and what to import |
| `jobs`, `place`, `memory_limit`, `keep` | run this; keep what it returns for so many seconds, up to so many bytes |
| `batch`, `timeout`, with the jobs | they are the jobs of one call of a task with this option; otherwise there is one job |
| `cancel` | the jobs with these ids and tokens shall stop |
| `superseded` | newer jobs wait for the end of those with these ids and tokens |
| `extended` | the answer to `extend`: "" for yes, "lost", or an error |
| `end` | leave |

| from the child | |
|---|---|
| `ready` | the imports are over |
| `began` | the jobs are taken up |
| `extend` | the handler wants the lease of a job extended by so many seconds |
| `settling` | the handler settles a job itself, and how: the name of a `Stage` |
| `progress` | percentage and message of a job's progress |
| `missing` | the result of a job cannot be stored |
| `outcome`, `error`, `settling` | what came of a job, and the class of the error |
| `frees`, with the outcome | what the handler settled frees a slot of a lane |
| `problems`, with the outcome | what was wrong with the retry policy of the task |
| `over`, `worn`, with the last outcome | this was the last one; whether to end this process |

What is about a job carries its `id` and its `token`.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import orjson

from pgqueue.job import Job
from pgqueue.outcome import Outcome, OutcomeKind
from pgqueue.result import Kept

Message = dict[str, Any]
HEAD = struct.Struct(">I")
CHUNK = 65536


class Channel:
    """One end. Any thread may send, one receives. OSError when the other end, or the descriptor, is gone."""

    def __init__(self, end: socket.socket, *, most: int = 2**32 - 1) -> None:
        self._socket = end
        self._most = most
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._broken: ValueError | None = None
        self._file = self._identity()

    def fileno(self) -> int:
        """The descriptor."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send one message."""
        data = orjson.dumps(message)
        with self._sending:
            if self._identity() != self._file:  # a job closed all descriptors, and has opened something else since
                raise OSError("the line is closed, and its descriptor is another file's")
            self._socket.sendall(HEAD.pack(len(data)) + data)

    def receive(self) -> list[Message]:
        """Wait for the next piece, and return the messages that are complete with it; EOFError at the end, ValueError for
        what is no message, after the messages before it."""
        self.check()
        data = self._socket.recv(CHUNK)
        if not data:
            raise EOFError("the other end is closed")
        self._buffer += data
        messages: list[Message] = []
        try:
            while (message := self._first()) is not None:
                messages.append(message)
        except ValueError as error:
            # That a job has begun must not be forgotten over what it says next: it would be run a second time.
            self._broken = error
            if not messages:
                raise
        return messages

    def check(self) -> None:
        """ValueError when something has come that is no message."""
        if self._broken is not None:
            raise self._broken

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _first(self) -> Message | None:
        if len(self._buffer) < HEAD.size:
            return None
        (size,) = HEAD.unpack_from(self._buffer)
        if size > self._most:
            raise ValueError("this is no message")
        end = HEAD.size + size
        if len(self._buffer) < end:
            return None
        message = orjson.loads(self._buffer[HEAD.size : end])
        del self._buffer[:end]
        if not isinstance(message, dict):
            raise ValueError("this is no message")
        return message

    def _identity(self) -> tuple[int, int]:
        found = os.fstat(self._socket.fileno())
        return found.st_dev, found.st_ino


def pack(words: Iterable[str]) -> list[str]:
    """Paths and arguments, which may hold bytes that are no text."""
    return [os.fsencode(word).decode("latin-1") for word in words if isinstance(word, str)]


def unpack(words: Iterable[str]) -> list[str]:
    """What `pack` was given."""
    return [os.fsdecode(word.encode("latin-1")) for word in words]


def read_job(values: list[Any]) -> Job:
    """A job that was sent as the list of its fields."""
    fields = dict(zip(Job._fields, values, strict=True))
    if fields["created_utc"] is not None:
        fields["created_utc"] = datetime.fromisoformat(fields["created_utc"])
    return Job(**fields)


def outcome_message(outcome: Outcome) -> list[Any]:
    """An outcome as it is sent."""
    kept = outcome.kept
    more = None if kept is None else [kept.seconds, kept.value_json, kept.error]
    return [outcome.kind.value, outcome.delay, outcome.error_json, outcome.reason, outcome.steered, more]


def read_outcome(values: Any) -> Outcome:
    """An outcome that was sent; ValueError or TypeError for what is none."""
    kind, delay, error_json, reason, steered, more = values
    seconds, value_json, why = more or (0.0, None, None)
    for text in (error_json, reason, value_json, why):
        if not isinstance(text, str | None):
            raise TypeError("this is no outcome")
    kept = None if more is None else Kept(float(seconds), value_json, why)
    return Outcome(OutcomeKind(kind), float(delay), error_json, reason, steered is True, kept)
