"""The one public door: what is in it, that it is sorted, and that opening it is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pgqueue
from pgqueue import errors

PACKAGE = Path(pgqueue.__file__).parent


def test_public_names_are_sorted_and_exist() -> None:
    assert pgqueue.__all__ == sorted(pgqueue.__all__)
    assert all(hasattr(pgqueue, name) for name in pgqueue.__all__)


def test_every_error_is_public_has_one_root_and_stands_in_the_drawn_tree() -> None:
    tree = {name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, Exception)}
    for name, cls in tree.items():
        assert issubclass(cls, pgqueue.PgQueueError)
        assert name in pgqueue.__all__
        assert name in (errors.__doc__ or "")


def test_importing_pgqueue_imports_no_framework() -> None:
    heavy = "{'django', 'flask', 'starlette', 'fastapi', 'sqlalchemy', 'alembic', 'typer', 'rich', 'PIL'}"
    code = f"import sys, pgqueue.api; print(sorted({heavy} & {{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_library_holds_no_assert() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)], path


def test_every_public_thing_says_what_it_promises() -> None:
    for name in pgqueue.__all__:
        thing = getattr(pgqueue, name)
        if name != "__version__":
            assert thing.__doc__, name
    for cls in (
        pgqueue.PgQueue,
        pgqueue.AsyncPgQueue,
        pgqueue.Task,
        pgqueue.CurrentJob,
        pgqueue.BatchJob,
        pgqueue.Batch,
    ):
        for name, member in vars(cls).items():
            if not name.startswith("_"):
                assert member.__doc__, f"{cls.__name__}.{name}"


def test_the_two_clients_have_the_same_methods() -> None:
    sync, asynchronous = (
        {name for name in vars(cls) if not name.startswith("_")} for cls in (pgqueue.PgQueue, pgqueue.AsyncPgQueue)
    )
    assert sync == asynchronous


def test_modules_and_functions_stay_small() -> None:
    for path in sorted([*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "migrations").rglob("*.py")]):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                # The signature (a command declares its options there) and the docstring are not counted.
                body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
                assert (node.end_lineno or 0) - body[0].lineno < 40, f"{path}: {node.name}"
