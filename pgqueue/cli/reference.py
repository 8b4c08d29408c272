"""docs/cli.md, written from the commands themselves: ``python -m pgqueue.cli.reference > docs/cli.md``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
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

- **SIGTERM, SIGINT (Ctrl-C) or SIGHUP**: no new jobs; what has not started is given back; what runs gets `--grace`
  seconds; then the worker leaves with 0.
- **A second one, or the end of the grace time**: what still runs is given back at once. No attempt is burned, and another
  worker may take it immediately.
- **Before the worker has started**: it leaves with 0.
- **SIGKILL, or a crash**: the leases run out after `--lease` seconds, and other workers take the jobs back.

SIGHUP reloads nothing; under `nohup` it stays ignored. With `--processes N` signal the parent: it asks its children to
stop. Where a supervisor signals parent and children, as systemd does, it is still one request. Children whose parent was
killed stop by themselves. In a container start the worker without a shell around it (`CMD ["pgqueue", "worker", …]`), or
with `exec`: a shell as PID 1 does not pass signals on.
"""
SHARED = ("database_url", "schema", "quiet", "traceback")


def reference() -> str:
    """The whole page."""
    root = command()
    shared = [parameter for parameter in root.params if parameter.name in SHARED]
    parts = [HEAD, "## Options of every command\n", *_table(shared), ""]
    for name, node in root.commands.items():
        parts += _section(node, f"pgqueue {name}")
    return "\n".join(parts).rstrip() + "\n"


def _section(node: Any, path: str) -> Iterator[str]:
    own = [parameter for parameter in node.params if parameter.name not in (*SHARED, "help") and not _hidden(parameter)]
    arguments = "".join(f" {_metavar(parameter)}" for parameter in own if not _is_option(parameter))
    inner = getattr(node, "commands", {})
    yield f"## {path}\n"
    yield f"`{path}{' COMMAND' if inner else arguments} [OPTIONS]`\n"
    yield f"{inspect.cleandoc(node.help or '')}\n"
    yield from [*_table(own), ""] if own else []
    for name, child in inner.items():
        yield from _section(child, f"{path} {name}")


def _table(parameters: Sequence[Any]) -> Iterator[str]:
    yield "| option | meaning |\n|---|---|"
    for parameter in parameters:
        words = " ".join([*parameter.opts, _metavar(parameter)]) if _is_option(parameter) else _metavar(parameter)
        usual = f" Default: {_plain(parameter.default)}." if _shows_default(parameter) else ""
        yield f"| `{words.strip()}` | {parameter.help}{usual} |"


def _is_option(parameter: Any) -> bool:
    return str(parameter.param_type_name) == "option"


def _hidden(parameter: Any) -> bool:
    return bool(getattr(parameter, "hidden", False))


def _metavar(parameter: Any) -> str:
    if getattr(parameter, "is_flag", False):
        return ""
    return str(parameter.metavar) + ("…" if parameter.nargs == -1 else "")


def _shows_default(parameter: Any) -> bool:
    return _is_option(parameter) and parameter.default not in (None, "", False, ())


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))


if __name__ == "__main__":
    print(reference(), end="")
