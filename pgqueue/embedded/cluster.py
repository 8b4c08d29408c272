"""Making PostgreSQL's data directory, and running its server on it.

Everything here is called by a process that holds `Folder.lock`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pgqueue.embedded.account import Account, server_account
from pgqueue.embedded.binaries import binaries_major, find_binaries, readable_binaries
from pgqueue.embedded.folder import PORT, Folder, last_lines
from pgqueue.embedded.locks import Lock
from pgqueue.errors import EmbeddedError

RECOVERY_SECONDS = 600.0  # after a crash, a server replays its log before it accepts connections
SILENCE_SECONDS = 30.0  # the processes of a killed server need a moment to notice and go
STOP_SECONDS = 120.0
POLL_SECONDS = 0.02


def reach_server(folder: Folder, options: Sequence[str]) -> bool:
    """Wait until the server of `folder` accepts connections; launch it where none lives. True if this launched it.

    Raises `EmbeddedError` if the server cannot be launched, or lives and does not answer.
    """
    launched = False
    for waited in _polls():
        accepts, answers = _ping(folder)
        if accepts:
            return launched
        # No pid is asked: it may be reused, or a zombie. The kernel knows who still holds the lock.
        alive = Lock(folder.alive)
        try:
            if alive.try_acquire():
                if launched:
                    raise EmbeddedError(
                        f"The PostgreSQL server in {folder.root} ended while it started:\n{folder.log_tail()}"
                    )
                _launch(folder, options, alive)
                launched = True
        finally:
            alive.close()
        if waited > (RECOVERY_SECONDS if launched or answers else SILENCE_SECONDS):
            break
    raise EmbeddedError(
        f"The PostgreSQL server in {folder.root} runs but accepts no connection; its log is {folder.log}:\n"
        f"{folder.log_tail()}"
    )


def shut_server_down(folder: Folder) -> None:
    """Stop the server of `folder`, if it runs, and wait until its last process is gone.

    Raises `EmbeddedError` if that takes more than two minutes.
    """
    alive, signalled = Lock(folder.alive), 0
    try:
        for waited in _polls():
            if alive.try_acquire():
                shutil.rmtree(folder.sockets, ignore_errors=True)
                return
            pid = _postmaster(folder)
            if pid not in (0, signalled):  # 0 would be this process and all of its group
                signalled = pid
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)  # "fast": roll open transactions back, write everything out
            if waited > STOP_SECONDS:
                break
    finally:
        alive.release()
    raise EmbeddedError(
        f"The PostgreSQL server in {folder.root} does not stop; its log is {folder.log}:\n{folder.log_tail()}"
    )


def _polls() -> Iterator[float]:
    begin = time.monotonic()
    while True:
        yield time.monotonic() - begin
        time.sleep(POLL_SECONDS)


def _ping(folder: Folder) -> tuple[bool, bool]:
    """Whether the server accepts connections, and whether it answers at all."""
    from psycopg import pq

    if not folder.sockets_are_ours():
        return False, False
    target = f"host={folder.sockets} port={PORT} user=postgres dbname=postgres connect_timeout=2"
    answer = pq.PGconn.ping(target.encode())
    return answer == pq.Ping.OK, answer in (pq.Ping.OK, pq.Ping.REJECT)


def _postmaster(folder: Folder) -> int:
    """The pid of the server; 0 while its file does not say (it ends by itself, within a minute, if that lasts)."""
    try:
        return max(int((folder.data / "postmaster.pid").read_text().split("\n", 1)[0]), 0)
    except (OSError, ValueError):
        return 0


def _launch(folder: Folder, options: Sequence[str], alive: Lock) -> None:
    account = server_account()
    if not account.may(["/bin/sh", "-c", 'cd "$0"', folder.root]):
        raise EmbeddedError(
            f"The account {account.name}, which runs PostgreSQL for this process, may not enter {folder.root}: "
            "choose a folder that is open to it (PGQUEUE_DATA_DIR)."
        )
    binaries = readable_binaries(find_binaries(), account, folder.root)
    if not folder.data.exists():
        _make_data(folder, binaries, account, alive)
    folder.hand_over(account)
    _check_version(folder, binaries, account)
    _write_access_rules(folder.data, account)
    folder.renew_sockets(account)
    # PostgreSQL believes this file where a process of that number lives, be it somebody else's. `alive` knows better.
    (folder.data / "postmaster.pid").unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        folder.log.replace(folder.log.with_name("server.log.1"))
    # The settings that the promises of this package rest on come last, where `options` cannot undo them.
    settings = {
        "listen_addresses": "",
        "unix_socket_directories": folder.sockets,
        "unix_socket_permissions": "0700",
        "port": PORT,
    }
    words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    server = [str(binaries / "postgres"), "-D", str(folder.data), "-c", "cluster_name=pgqueue"]
    account.detach([*server, *options, *words], log=folder.log, keep=alive.fileno())


def _make_data(folder: Folder, binaries: Path, account: Account, alive: Lock) -> None:
    """Make the data directory under another name first: whoever is killed meanwhile leaves no half of one behind."""
    if folder.unfinished.exists():
        shutil.rmtree(folder.unfinished)
    for ctype in ("C.UTF-8", "C"):  # some systems, and old releases of some, have no C.UTF-8
        folder.unfinished.mkdir(mode=0o700, exist_ok=True)
        if account.switches:
            os.chown(folder.unfinished, account.uid, account.gid)
        status, output = account.run(
            [
                *(binaries / "initdb", "-D", folder.unfinished, "-U", "postgres", "--auth=peer", "--encoding=UTF8"),
                *("--locale=C", f"--lc-ctype={ctype}", "--data-checksums"),
            ],
            keep=[alive.fileno()],
        )
        if status == 0:
            folder.unfinished.rename(folder.data)
            _sync(folder.root)
            return
    shutil.rmtree(folder.unfinished, ignore_errors=True)
    raise EmbeddedError(f"initdb could not make a data directory in {folder.root}:\n{last_lines(output)}")


def _sync(place: Path) -> None:
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_version(folder: Folder, binaries: Path, account: Account) -> None:
    try:
        made_by = int((folder.data / "PG_VERSION").read_text())
    except (FileNotFoundError, ValueError):
        raise EmbeddedError(
            f"{folder.data} is not the data directory of a PostgreSQL that pgqueue knows: choose another folder."
        ) from None
    if (have := binaries_major(binaries, account)) != made_by:
        raise EmbeddedError(
            f"The data in {folder.data} was made by PostgreSQL {made_by}, and the programs in {binaries} are "
            f"PostgreSQL {have}: set PGQUEUE_PG_BIN to the programs of PostgreSQL {made_by}, or choose another folder."
        )


def _write_access_rules(data: Path, account: Account) -> None:
    # Before each start, because root may run the server by other means than last time, under another name.
    head = "# Written by pgqueue before each start of the server.\n"
    (data / "pg_ident.conf").write_text(f'{head}pgqueue "{account.peer}" postgres\n')
    rules = "local all all peer map=pgqueue\nlocal replication all peer map=pgqueue\n"
    (data / "pg_hba.conf").write_text(head + rules)
