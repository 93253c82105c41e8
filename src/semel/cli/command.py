"""What every command has: its URL, its exit code, its errors as sentences, its question.

Exit codes: 0 done, 1 not found or refused, 2 bad input, 3 the store did not answer, 70 a defect of
ours.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from semel.cli import show
from semel.errors import SemelError, SettingsError, StoreUnavailableError
from semel.stores import path_of
from semel.stores.sqlite_file import refuse_unsafe

REFUSED = 1
BAD_INPUT = 2
UNAVAILABLE = 3
DEFECT = 70

ENV = "SEMEL_URL"


class Command(TyperCommand):
    """Shows its arguments as they are typed."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        given = [p.metavar or "" for p in self.params if p.param_type_name == "argument"]
        return [self.options_metavar or "", *given]


# --- errors -------------------------------------------------------------------------------------


def fail(text: str, code: int = REFUSED, *, url: str = "") -> NoReturn:
    show.print_error(show.redact(text, url))
    raise typer.Exit(code)


@contextmanager
def reporting(url: str) -> Iterator[None]:
    """Turn what Semel raises into a sentence and an exit code."""
    try:
        yield
    except StoreUnavailableError as error:
        fail(str(error), UNAVAILABLE, url=url)
    except SemelError as error:
        fail(str(error), BAD_INPUT, url=url)


# --- the store ----------------------------------------------------------------------------------


def needed(url: str) -> str:
    if not url:
        fail(f"give the store's URL, or set {ENV}", BAD_INPUT)
    return url


def url_and(what: str, first: str | None, second: str | None) -> tuple[str, str]:
    """Two words are the URL and the other; one word is the other, if the URL is in ENV."""
    if first is not None and second is not None:
        return first, second
    url = os.environ.get(ENV)
    if first is None or not url:
        fail(f"give the store's URL and the {what}, or set {ENV} and give the {what}", BAD_INPUT)
    return url, first


# Not required as typer sees it: its own message names neither the store nor the variable.
Url = Annotated[
    str,
    typer.Argument(
        metavar="[URL]",
        envvar=ENV,
        show_default=False,
        callback=needed,
        help="The store, e.g. sqlite:///semel.db.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def refuse_memory(url: str) -> None:
    scheme = url.partition("://")[0].lower()
    if scheme == "memory" or (on_disk(url) and path_of(url) == ":memory:"):
        raise SettingsError(
            f"{url} lives inside the process that made it; give the URL of a store on disk "
            "or on a server"
        )


def refuse_empty(url: str) -> None:
    """A store that is made by opening it would hide a mistyped path behind "not found"."""
    refuse_memory(url)
    if on_disk(url):
        refuse_absent(path_of(url))


def refuse_absent(path: str) -> None:
    """Raise if nothing is at `path`: `DamagedStoreError` if a `-wal` with content is beside it."""
    if not Path(path).exists():
        refuse_unsafe(os.path.realpath(path))
        raise SettingsError(f"there is nothing at {path!r}; check the path in the URL")


def on_disk(url: str) -> bool:
    return url.partition("://")[0].lower() in ("sqlite", "file")


# --- durations ----------------------------------------------------------------------------------

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "": 1.0}
_DURATION = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[a-z]*)")


FOREVER = "forever"


def seconds_or_forever(option: str, text: str) -> float | None:
    """None for ever."""
    return None if text == FOREVER else seconds(option, text, "1h, 7d or forever")


def seconds(option: str, text: str, written: str = "1h or 7d") -> float:
    """A duration as people write it: 90, 90s, 1.5h, 7d."""
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None or found["unit"] not in _UNITS:
        fail(f"{option} {text!r} is not a duration; write 500ms, 10s, 5m, {written}", BAD_INPUT)
    return float(found["number"]) * _UNITS[found["unit"]]


# --- people -------------------------------------------------------------------------------------


def confirm(about: str, question: str) -> None:
    """Asked on stderr: stdout is for the answer."""
    sys.stderr.write(f"{show.clean(about)}\n{show.clean(question)} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise typer.Abort
