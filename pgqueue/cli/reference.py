"""docs/cli.md, written from the commands themselves: ``python -m pgqueue.cli.reference > docs/cli.md``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pgqueue.cli import command

HEAD = """\
# The command line

This page is written by `python -m pgqueue.cli.reference` from the commands themselves; a test compares the two.

The database is that of `--database-url` or of the environment variable `PGQUEUE_DATABASE_URL`. With neither, pgqueue
starts a private PostgreSQL for the time of the command, makes the schema in it, and says so in one line on stderr.
`worker` and `enqueue` use the URL of the application's own PgQueue, if it has one; an explicit `--database-url` wins.

Results go to stdout, everything else to stderr. Exit status: 0 done, 1 failed (one sentence on stderr says why), 2 called
wrongly, 130 interrupted, 141 when the reader of the output has gone (`| head`).

## Stopping a worker

| what comes | what happens |
|---|---|
| SIGTERM, SIGINT (Ctrl-C) or SIGHUP | no new jobs; what has not started is given back; what runs gets `--grace` seconds; then the worker leaves with 0 |
| a second one, or the end of the grace time | what still runs is given back at once: no attempt is burned, another worker may take it immediately |
| either, before the worker has started | it leaves with 0 |
| SIGKILL, a crash | the leases run out after `--lease` seconds, other workers take the jobs back |

SIGHUP reloads nothing; under `nohup` it stays ignored. With `--processes N` signal the parent: it asks its children to
stop. Where a supervisor signals parent and children, as systemd does, it is still one request. Children whose parent was
killed stop by themselves. In a container start the worker without a shell around it (`CMD ["pgqueue", "worker", …]`), or
with `exec`: a shell as PID 1 does not pass signals on.
"""
WIDTH = 100


def reference() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(f"{section}\n" for section in _sections(command(), "pgqueue", None))]).rstrip() + "\n"


def _sections(node: Any, path: str, parent: Any) -> Iterator[str]:
    context = node.context_class(node, info_name=path.rsplit(" ", 1)[-1], parent=parent, terminal_width=WIDTH)
    text = re.sub(r"[ \t]+$", "", node.get_help(context), flags=re.MULTILINE).strip()
    yield f"## {path}\n\n```\n{text}\n```"
    for name in getattr(node, "commands", {}):
        yield from _sections(node.commands[name], f"{path} {name}", context)


if __name__ == "__main__":
    print(reference(), end="")
