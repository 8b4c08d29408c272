"""docs/migrating/: what stands there as "after" runs, and every page has its parts."""

from __future__ import annotations

import re
from pathlib import Path

import django
import pytest

from pgqueue import migrate
from tests.callers import django_connection
from tests.integration.test_documentation import ROOT, blocks
from tests.integration.test_testing_documentation import SETTINGS_BESIDE, run

FOLDER = ROOT / "docs" / "migrating"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.name != "README.md")
PEERS = ["celery.md", "django-q.md", "dramatiq.md", "procrastinate.md", "rq.md"]


def test_there_is_a_page_for_each_and_the_index_names_it() -> None:
    assert [page.name for page in PAGES] == PEERS
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\]\(([\w-]+\.md)\)", index.splitlines()[2])) == PEERS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_a_table_and_an_example_before_and_after(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 15
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) == 4, row
    assert text.index("## Before") < text.index("## After")
    assert blocks(page, "py")
    for block in blocks(page, "py"):
        compile(block, str(page), "exec", dont_inherit=True)  # theirs, not run: they need a broker


@pytest.mark.parametrize(
    "page", [*PAGES, FOLDER / "README.md", ROOT / "docs" / "testing.md"], ids=lambda page: page.name
)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        file = (page.parent / target) if target else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{target}#{anchor}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "django-q.md"], ids=lambda page: page.name)
def test_the_example_after_runs(
    page: Path, database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PGQUEUE_DATABASE_URL", database)
    namespace: dict[str, object] = {"__name__": "shop"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec", dont_inherit=True), namespace)
    queue = namespace["pq"]
    if page.name != "procrastinate.md":  # an AsyncPgQueue, which has closed itself
        queue.close()  # type: ignore[attr-defined]


@pytest.mark.skipif(
    not any((ROOT / "pgqueue/contrib/django/migrations").glob(f"{migrate.heads()[0][:4]}*.py")),
    reason="Django's migrations end before the newest revision: see tests/contrib/django/test_migrations.py",
)
def test_the_example_for_django_q_is_a_project_whose_test_passes(database: str, tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    for block in blocks(FOLDER / "django-q.md", "python"):
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block, encoding="utf-8")
    connected = django_connection(database).settings_dict
    entry = {name: connected[name] for name in ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")}
    with (tmp_path / "shop" / "settings.py").open("a", encoding="utf-8") as settings:
        settings.write(SETTINGS_BESIDE.format(database=entry))
        if django.VERSION < (6, 0):
            settings.write('INSTALLED_APPS.append("django_tasks")\n')
    said = run(["django", "test", "shop", "--noinput"], tmp_path, DJANGO_SETTINGS_MODULE="shop.settings")
    assert "Ran 1 test" in said
