"""The line between a worker and a child process: what was said before nonsense still counts."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pgqueue.worker.channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_message_that_arrives_together_with_nonsense_is_not_lost(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    Channel(theirs).send(began=7)
    theirs.sendall(b"\xff" * 100)
    channel = Channel(ours, most=1024)
    assert channel.receive() == [{"began": 7}]
    for _ in range(2):
        with pytest.raises(ValueError, match="no message"):
            channel.receive()


def test_a_message_in_pieces_is_one_message(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    spare, copy = socket.socketpair()
    with spare, copy:
        Channel(copy).send(outcome=["completed", 0.0, None, None, False], error=None)
        data = spare.recv(4096)
    channel = Channel(ours)
    got = []
    for byte in data:
        theirs.sendall(bytes([byte]))
        got += channel.receive()
    assert got == [{"outcome": ["completed", 0.0, None, None, False], "error": None}]
