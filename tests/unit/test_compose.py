"""The compose file can only be read here, not run: what it names must exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from pgqueue.config import OTHER_VARIABLES, Settings

ROOT = Path(__file__).parents[2]


def services() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"])


def test_the_services_and_the_tests_profile_are_there() -> None:
    assert set(services()) == {"postgres", "pgbouncer", "migrate", "worker", "tests"}
    assert services()["tests"]["profiles"] == ["tests"]
    assert services()["postgres"]["image"] == "postgres:${POSTGRES_VERSION:-18}"
    assert services()["pgbouncer"]["environment"]["POOL_MODE"] == "transaction"


def test_every_variable_of_ours_is_one_that_pgqueue_reads() -> None:
    known = {f"PGQUEUE_{name.upper()}" for name in Settings.__dataclass_fields__} | OTHER_VARIABLES
    for service in services().values():
        ours = {name for name in service.get("environment", {}) if name.startswith("PGQUEUE_")}
        assert ours <= known


def test_every_build_target_and_dependency_exists() -> None:
    targets = set(re.findall(r"^FROM .* AS (\w+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE))
    for service in services().values():
        assert service.get("build", {}).get("target", "worker") in targets
        assert set(service.get("depends_on", {})) <= set(services())


def test_every_file_that_the_image_copies_exists() -> None:
    for line in re.findall(r"^COPY (.*)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists(), name
