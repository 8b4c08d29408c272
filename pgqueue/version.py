"""The version of this package, as installed, and the schemas that it runs on."""

import re
from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("pgqueue")
except PackageNotFoundError:  # a source tree on sys.path
    __version__ = "0+unknown"

SCHEMA_REVISION = "0012"
"""The revision of the schema that this version is made for."""

_NOTE = re.compile(r"Revision (\w+): workers of revision (\w+) and later run on it\.")


def schema_note(revision: str, oldest: str) -> str:
    """What a migration leaves as the comment of the version table: for the workers of releases that do not know it."""
    return f"Revision {revision}: workers of revision {oldest} and later run on it."


def runs_on(revision: str | None, note: str | None) -> bool:
    """Whether this version runs on a schema of `revision` whose version table has the comment `note`.

    On its own revision, and on a newer one that says so. A note that is missing, or of another revision, allows nothing.
    """
    if revision is None or revision == SCHEMA_REVISION:
        return revision is not None
    said = _NOTE.fullmatch(note or "")
    return said is not None and said[1] == revision and said[2] <= SCHEMA_REVISION < revision
