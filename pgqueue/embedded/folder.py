"""The files of one private PostgreSQL: what lies where, and who may touch it."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from pgqueue.embedded.account import Account, account_name
from pgqueue.embedded.locks import Lock
from pgqueue.errors import EmbeddedError

PORT = 5432  # only the name of the socket: nothing listens on TCP


@dataclass(frozen=True, slots=True)
class Folder:
    """One private PostgreSQL lies in `root`; `root` is an absolute path without symbolic links."""

    root: Path

    @property
    def data(self) -> Path:
        """PostgreSQL's own data directory."""
        return self.root / "data"

    @property
    def unfinished(self) -> Path:
        """A data directory in the making."""
        return self.root / "data.unfinished"

    @property
    def lock(self) -> Path:
        """Locked by whoever starts or stops the server."""
        return self.root / "lock"

    @property
    def users(self) -> Path:
        """Locked, shared, by every user of the server."""
        return self.root / "users"

    @property
    def alive(self) -> Path:
        """Locked by the server and all of its processes, for as long as one of them lives."""
        return self.root / "alive"

    @property
    def log(self) -> Path:
        """What the server printed since its last start; the run before that is in ``server.log.1``."""
        return self.data / "server.log"

    @property
    def sockets(self) -> Path:
        """The folder of the server's socket: short, because the path of a socket has at most 107 bytes.

        Not taken from TMPDIR or XDG_RUNTIME_DIR: these differ between a shell, a service and a cron job, and all of
        them must find the same server.
        """
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]
        return Path("/tmp") / f"pgqueue-{os.geteuid()}-{digest}"  # noqa: S108 (made anew, checked for its owner)

    def create(self) -> None:
        """Make `root`; raises `EmbeddedError` if it is something else already, `OSError` if it cannot be made."""
        if self.root.exists() and not self.root.is_dir():
            raise EmbeddedError(f"{self.root} is a file; pgqueue needs a folder for the data of its PostgreSQL.")
        if (self.root / "PG_VERSION").exists():
            raise EmbeddedError(
                f"{self.root} is the data directory of another PostgreSQL; give pgqueue a folder of its own."
            )
        if not self.root.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            self.root.chmod(0o711)  # passable, for the account that runs the server of root; `data` itself is closed

    def check_owner(self, lock: Lock) -> None:
        """Raises `EmbeddedError` where another account made this folder. Only root gets far enough to need it."""
        if lock.owner() != os.geteuid():
            raise EmbeddedError(
                f"{self.root} holds the PostgreSQL of the account {account_name(lock.owner())}, and this process runs "
                f"as {account_name(os.geteuid())}: choose another folder, or run as that account."
            )

    def hand_over(self, account: Account) -> None:
        """Give the data to `account`, where an earlier start (root's, by other means) left it with another one."""
        if os.geteuid() != 0 or self.data.stat().st_uid == account.uid:
            return
        for place, folders, files in os.walk(self.data):
            for name in (".", *folders, *files):
                os.chown(Path(place, name), account.uid, account.gid, follow_symlinks=False)

    def renew_sockets(self, account: Account) -> None:
        """An empty folder for the socket, closed to others. Only for a moment in which no server runs."""
        # Made anew, never adopted: in /tmp, anybody may have put a folder of that name.
        if self.sockets.exists():
            shutil.rmtree(self.sockets)
        self.sockets.mkdir(mode=0o700)
        if account.switches:
            os.chown(self.sockets, account.uid, account.gid)

    def sockets_are_ours(self) -> bool:
        """Whether the socket folder belongs to the owner of the data, so that no stranger answers in its place."""
        try:
            return self.sockets.lstat().st_uid == self.data.stat().st_uid
        except FileNotFoundError:
            return False

    def log_tail(self, lines: int = 5) -> str:
        """The last lines of the server's log, for a message; empty if there is none."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return ""
        return last_lines(text, lines)


def last_lines(text: str, lines: int = 5) -> str:
    """The last lines of `text` that say something."""
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])
