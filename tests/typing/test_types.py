"""The public types, as a type checker of a user sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(600)  # a type checker without its cache takes minutes on a busy machine
def test_tasks_keep_their_signatures_and_wrong_arguments_are_found() -> None:
    pytest.importorskip("mypy")
    files = [str(path) for path in sorted(HERE.glob("check_*.py"))]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", "/dev/null", *files],
        capture_output=True,
        text=True,
        cwd=HERE.parents[1],
    )
    assert done.returncode == 0, done.stdout
