"""Node and its packages, in a work folder of the benchmark: never in the repository.

The folder is PGQUEUE_BENCH_NODE, or one in the user's cache; what is missing there is installed with npm at first use.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path

import platformdirs

PACKAGES = {"graphile-worker": "0.18.0", "pg-boss": "12", "pg": "8", "node": "24"}
VARIABLE = "PGQUEUE_BENCH_NODE"
SCRIPTS = Path(__file__).parent / "peers"


def folder() -> Path:
    """Where the packages are."""
    return Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("pgqueue") / "bench-node")


def program() -> str:
    """The node that was installed beside the packages, or else the system's."""
    own = folder() / "node_modules" / ".bin" / "node"
    return str(own) if own.exists() else "node"


@functools.cache
def missing(package: str) -> str | None:
    """Why this package cannot be used, or None; installs it if need be."""
    if shutil.which("npm") is None:
        return "node and npm are not installed"
    if (folder() / "node_modules" / package).exists():
        return None
    folder().mkdir(parents=True, exist_ok=True)
    words = [f"{name}@{wanted}" for name, wanted in PACKAGES.items()]
    try:
        done = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder()), *words],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "npm install did not end within five minutes"
    return None if done.returncode == 0 else f"npm install failed: {done.stderr.strip()[-200:]}"


def version(package: str) -> str:
    """Of an installed package, with that of node."""
    found = json.loads((folder() / "node_modules" / package / "package.json").read_text())["version"]
    runtime = subprocess.run([program(), "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return f"{found} on node {runtime}"


def words(script: str, *more: str) -> list[str]:
    """The command line of one of the scripts beside the adapters."""
    return [program(), str(SCRIPTS / script), *more]


def environment(url: str) -> dict[str, str]:
    """Where the packages and the database are."""
    return {VARIABLE: str(folder()), "PGQUEUE_BENCH_TARGET": url}
