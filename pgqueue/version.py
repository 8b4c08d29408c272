"""The version of this package, as installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("pgqueue")
except PackageNotFoundError:  # a source tree on sys.path
    __version__ = "0+unknown"

SCHEMA_REVISION = "0003"
"""The revision of the schema that this version works on."""
