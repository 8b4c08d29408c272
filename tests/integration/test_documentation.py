"""Every Python example of the README and of docs/ runs, in order, file by file; every test that is named exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
PROJECTS = ("django.md", "testing.md")
"""Pages whose examples are files of a project: see tests/contrib/ and test_testing_documentation.py."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in PROJECTS and blocks(page, "python")],
    ids=lambda page: page.name,
)
def test_the_examples_of_a_page_run(page: Path, database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PGQUEUE_DATABASE_URL", database)
    monkeypatch.setenv("PGQUEUE_DATA_DIR", str(tmp_path))
    module = ModuleType("example")  # known by its name, as SQLAlchemy wants it for the annotations of models
    monkeypatch.setitem(sys.modules, "example", module)
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), vars(module))
    queue = vars(module).get("pq")
    if queue is not None:
        queue.close()  # type: ignore[attr-defined]


def test_the_guarantees_name_tests_that_exist() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    files = list((ROOT / "tests").rglob("test_*.py"))
    bodies = [path.read_text(encoding="utf-8") for path in files]
    names = {path.name for path in files}
    named = re.findall(r"`(test_\w+(?:\.py)?)`", text)
    assert named
    for name in named:
        assert name in names or any(f"def {name}(" in body for body in bodies), name


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_begins_with_its_two_commands() -> None:
    commands = [block.strip() for block in blocks(ROOT / "README.md", "sh")][:2]
    assert len(commands) == 2
    assert all("\n" not in command for command in commands)
    assert commands[0].endswith("pgqueue demo")
    assert "pytest" in commands[1]
