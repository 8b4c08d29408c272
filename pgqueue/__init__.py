"""A job queue inside PostgreSQL: enqueue commits with the business write, workers hold fenced leases, nothing is lost.

Nothing is loaded before the first name is asked for: every run of pytest imports this package, for its plugin.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgqueue.api import *  # noqa: F403
    from pgqueue.api import __all__ as __all__
    from pgqueue.api import __version__ as __version__


def __getattr__(name: str) -> Any:
    """A name of the package, or a module of it that was not imported by itself."""
    import importlib
    from importlib.util import find_spec

    if name.startswith("__") and name not in ("__all__", "__version__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    try:
        found = getattr(importlib.import_module(f"{__name__}.api"), name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
