"""Who runs the server: PostgreSQL refuses to run as root, and as an account that has no name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgqueue.errors import EmbeddedError

if sys.platform != "win32":
    import pwd

# Mapped to 1, not to "nobody": every account that the namespace does not know looks like nobody inside it.
NAMESPACE_UID = 1
NAMESPACE = ("unshare", "--user", f"--map-user={NAMESPACE_UID}", f"--map-group={NAMESPACE_UID}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """How the programs of PostgreSQL are run.

    `uid` and `gid` own the server's files, `name` is for messages, `peer` is the name that the server sees when this
    process connects, `prefix` goes before every command, `switches` tells that `uid` is not the caller's.
    """

    uid: int
    gid: int
    name: str
    peer: str
    prefix: tuple[str, ...] = ()
    switches: bool = False

    def run(self, command: Sequence[str | Path], *, keep: Sequence[int] = ()) -> tuple[int, str]:
        """Run `command` to its end, with the descriptors `keep` left open in it; its status and what it printed."""
        done = subprocess.run(
            [*self.prefix, *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            pass_fds=keep,
            **self._surroundings(),
        )
        return done.returncode, done.stdout

    def may(self, command: Sequence[str | Path]) -> bool:
        """Whether `command` can be run, and succeeds."""
        try:
            return self.run(command)[0] == 0
        except PermissionError:
            return False

    def detach(self, command: Sequence[str | Path], *, log: Path, keep: int) -> None:
        """Run `command` in the background, out of reach of the terminal's signals, printing to `log`."""
        # The shell goes at once, so the server is nobody's child: a host program that waits for all of its children
        # never meets it. The words of the command travel as arguments, so nothing in them needs quoting.
        subprocess.run(
            ["/bin/sh", "-c", '"$@" >>"$0" 2>&1 &', str(log), *self.prefix, *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            pass_fds=(keep,),
            start_new_session=True,
            **self._surroundings(),
        )

    def _surroundings(self) -> dict[str, Any]:
        # PG* variables are meant for clients of other servers; a fixed locale makes the messages predictable.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        switch = {"user": self.uid, "group": self.gid, "extra_groups": []} if self.switches else {}
        return {"cwd": "/", "env": environment | {"LC_ALL": "C"}, **switch}


def server_account() -> Account:
    """The account for the server of this process.

    An ordinary account runs it itself. Root, and an account without a name (common in containers), run it in a user
    namespace: the files stay theirs, no other account is involved. Where that is forbidden, root runs it as
    ``PGQUEUE_PG_USER`` (which, if set, is also preferred to the namespace), `postgres` or `nobody`.
    Raises `EmbeddedError` if none of these is possible.
    """
    uid, name = os.geteuid(), _name(os.geteuid())
    if uid != 0 and name is not None:
        return Account(uid=uid, gid=os.getegid(), name=name, peer=name)
    wish = os.environ.get("PGQUEUE_PG_USER") if uid == 0 else None
    inside = _name(NAMESPACE_UID)
    if not wish and inside is not None and _namespaces_allowed():
        return Account(uid=uid, gid=os.getegid(), name=name or str(uid), peer=inside, prefix=NAMESPACE)
    if uid != 0:
        raise EmbeddedError(
            f"PostgreSQL needs an account with a name, and the user id {uid} has none on this system: "
            "add it to the system's accounts, or run as another one."
        )
    for other in _other_accounts(wish):
        return Account(uid=other.pw_uid, gid=other.pw_gid, name=other.pw_name, peer=name or "root", switches=True)
    problem = f"{wish} is no other account of this system" if wish else "no other account was found"
    raise EmbeddedError(
        f"PostgreSQL does not run as root, and {problem}: "
        "set PGQUEUE_PG_USER to an account that may run it, or run as an ordinary user."
    )


def account_name(uid: int) -> str:
    """The name of `uid` for a message: its number where it has no name."""
    return _name(uid) or str(uid)


def _name(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def _other_accounts(wish: str | None) -> Iterator[pwd.struct_passwd]:
    for name in (wish,) if wish else ("postgres", "nobody"):
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        if found.pw_uid != 0:
            yield found


def _namespaces_allowed() -> bool:
    if not shutil.which("unshare"):
        return False
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
