"""What is the application's own, by the name it has there."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from semel.cli import show
from semel.cli.command import BAD_INPUT, fail

__all__ = ["named", "show_trace"]


def named(where: str, example: str, hint: Callable[[ModuleType], str] = lambda _: "") -> Any:
    """What is called `MODULE:NAME`; `hint` says what else there is in the module."""
    name, _, rest = where.partition(":")
    if not name or not rest:
        fail(f"{where!r} is not MODULE:NAME; write it as in {example}", BAD_INPUT)
    module = _imported(name)
    found: Any = module
    for part in rest.split("."):
        found = getattr(found, part, None)
        if found is None:
            fail(f"{module.__name__} has no {rest!r}{hint(module)}", BAD_INPUT)
    return found


def _imported(module: str) -> ModuleType:
    """From here, as `python -m` would find it."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            show_trace(f"{module} could not be imported", error)
        fail(
            f"there is no module {error.name!r} here or among what is installed; run this in the "
            "folder that has it, or check the name",
            BAD_INPUT,
        )
    except Exception as error:  # noqa: BLE001 - whatever the application does when it is imported
        show_trace(f"{module} could not be imported", error)


def show_trace(what: str, error: Exception) -> NoReturn:
    """Theirs, not ours."""
    sys.stderr.write(show.redact("".join(traceback.format_exception(error))))
    fail(f"{what}: {type(error).__name__}: {error}", BAD_INPUT)
