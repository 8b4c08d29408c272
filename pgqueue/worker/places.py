"""Where a child process finds a task: by import, from what its parent's registry holds, never from text of the database."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

from pgqueue.core import Core
from pgqueue.errors import ConfigurationError
from pgqueue.task import PROCESS, BaseTask, TaskOptions, import_name
from pgqueue.worker import platform

importing = False
"""True in a child process while it imports the application, which must not start a worker then."""
told: dict[str, Any] = {}
"""In a child process: what the application of its parent tells that of the child, see `Controls.told`."""


class Place(NamedTuple):
    """A module that can be imported, and the way from it to the task: attributes, with dots between them."""

    module: str
    path: str

    def find(self, name: str, batch: int | None = None) -> BaseTask[..., Any]:
        """Import the module and return the task, in the child process; raises whatever the import raises. `batch`: the
        option of the task, where the name means only its function."""
        found: Any = importlib.import_module(self.module)
        for part in self.path.split("."):
            found = getattr(found, part)
        found = _meant(found)
        if isinstance(found, BaseTask):
            return found
        return _registered(found) or BaseTask(found, name, TaskOptions(batch=batch))


class Places:
    """The places of an application's tasks, each looked for once. ConfigurationError when one that shall run in a process of
    its own has none."""

    def __init__(self, app: Core) -> None:
        self.app = app
        self._known: dict[str, tuple[BaseTask[..., Any], Place | None]] = {}
        for task in app.tasks.values():
            if task.defaults.isolation == PROCESS:
                platform.require_children(f'task {task.name} with isolation="{PROCESS}"')
                self.of(task.name)

    def get(self, name: str) -> Place | None:
        """The place of the task of that name; None where no other process could import it, or nobody knows it."""
        task = self.app.tasks.get(name)
        if task is None:
            return None
        known = self._known.get(name)
        if known is None or known[0] is not task:
            known = self._known[name] = (task, _place_of(task))
        return known[1]

    def of(self, name: str) -> Place:
        """The same, and ConfigurationError instead of None."""
        place = self.get(name)
        if place is None:
            raise ConfigurationError(
                f'task {name} cannot run with isolation="{PROCESS}": another process could not import it; '
                "define it at the top level of a module, under the name of its function"
            )
        return place

    def modules(self) -> list[str]:
        """What a child imports before its first job: the module of the application, then those of its tasks. In the order of
        the imports here, since modules that import each other may not work in another one."""
        places = [place.module for name in list(self.app.tasks) if (place := self.get(name)) is not None]
        home = _home_of(self.app)
        wanted = dict.fromkeys([home, *places] if home else places)
        order = {name: number for number, name in enumerate(list(sys.modules))}
        return sorted(wanted, key=lambda name: (name != home, order.get(name, -1)))


def _place_of(task: BaseTask[..., Any]) -> Place | None:
    function = task.function
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(path, str) or module not in sys.modules:
        return None
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part, None)
    name, meant = _importable(module), _meant(found)
    # By name: where a framework's object stands for a task, each queue of the process has a task of its own for it.
    same = found is function or meant is task or (meant is not found and getattr(meant, "name", None) == task.name)
    return Place(name, path) if name and same else None


def _meant(found: Any) -> Any:
    """The task, where an object of a framework has the name that its function would have."""
    meant = getattr(found, "pgqueue_task", None) if hasattr(type(found), "pgqueue_task") else None
    return meant if isinstance(meant, BaseTask) else found


def _importable(module: str) -> str | None:
    """The name under which another process gets this module; None where that would be none or another one."""
    if module != "__main__":
        return module
    name, file = import_name(module), getattr(sys.modules["__main__"], "__file__", None)
    try:
        spec = importlib.util.find_spec(name)
        same = spec is not None and spec.origin and file and Path(spec.origin).samefile(file)
    except (ImportError, ValueError, OSError, AttributeError):
        return None
    return name if same else None


def _registered(function: Any) -> BaseTask[..., Any] | None:
    """The task of a function whose name means the function itself: only the task knows its rule and its middleware."""
    for module in list(sys.modules.values()):
        for app in [value for value in list(getattr(module, "__dict__", {}).values()) if isinstance(value, Core)]:
            for task in app.tasks.values():
                if task.function is function:
                    return task
    return None


def _home_of(app: Core) -> str | None:
    """The first module that was imported of those in which this object has a name, unless it says otherwise."""
    if app.home:
        return app.home
    for name, module in list(sys.modules.items()):
        try:
            values = list(object.__getattribute__(module, "__dict__").values())
        except AttributeError:
            continue
        if any(value is app for value in values):
            found = _importable(name)
            if found is not None:
                return found
    return None
