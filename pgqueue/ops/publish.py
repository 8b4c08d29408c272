"""Publish: a job for every subscription of a topic, and the message where the topic keeps messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pgqueue.ops import Op, Step, Texts
from pgqueue.ops.enqueue import CHUNK_BYTES, Call
from pgqueue.topic import Published, PublishedMany

CHUNK_MESSAGES = 1_000
"""Each makes a job per subscription."""


class Message(NamedTuple):
    """The arguments of the handlers as JSON texts, and the key whose order is kept."""

    call: Call
    key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Everything about messages but arguments and keys. `headers`: those that were given; `told`: the same and the topic."""

    topic: str
    headers: str | None
    told: str
    channel: str | None


def publish(envelope: Envelope, message: Message) -> Op[Published]:
    """One message, in one statement."""
    rows = yield _publish(envelope, [message])
    jobs, ids = rows[0][:2]
    return Published(int(jobs), None if ids is None else int(ids[0]))


def publish_many(envelope: Envelope, chunks: Iterable[list[Message]]) -> Op[PublishedMany]:
    """Any number of messages, a statement per chunk. All or nothing only where there is one, or in a transaction."""
    jobs, ids = 0, None
    for chunk in chunks:
        rows = yield _publish(envelope, chunk)
        jobs += int(rows[0][0])
        if rows[0][1] is not None:
            ids = [*(ids or ()), *rows[0][1]]
    return PublishedMany(jobs, ids)


def chunked(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """Cut by number and by bytes, reading no more than a chunk at a time."""
    chunk: list[Message] = []
    size = 0
    for message in messages:
        chunk.append(message)
        size += sum(len(half or "") for half in message.call)
        if len(chunk) >= CHUNK_MESSAGES or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _publish(envelope: Envelope, messages: list[Message]) -> Step:
    return Step(
        "message_publish",
        {
            "topic": envelope.topic,
            "headers": envelope.headers,
            "told": envelope.told,
            "channel": envelope.channel,
            "args": Texts([message.call[0] for message in messages]),
            "kwargs": Texts([message.call[1] for message in messages]),
            "keys": Texts([message.key for message in messages]),
        },
    )
