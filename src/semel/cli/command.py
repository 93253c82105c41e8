"""What every command has: its URL, its exit code, its errors as sentences, its question.

Exit codes: 0 done, 1 not found or refused, 2 bad input, 3 the store did not answer, 70 a defect of
ours.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from semel.cli import show
from semel.errors import SemelError, SettingsError, StoreUnavailableError
from semel.stores import _path as path_of

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


def _needed(url: str) -> str:
    if not url:
        fail(f"give the store's URL, or set {ENV}", BAD_INPUT)
    return url


# Not required as typer sees it: its own message names neither the store nor the variable.
Url = Annotated[
    str,
    typer.Argument(
        metavar="[URL]",
        envvar=ENV,
        show_default=False,
        callback=_needed,
        help="The store, e.g. sqlite:///semel.db.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def refuse_memory(url: str) -> None:
    scheme = url.partition("://")[0].lower()
    if scheme == "memory" or (on_disk(url) and path_of(url) in ("", ":memory:")):
        raise SettingsError(
            f"{url} lives inside the process that made it; give the URL of a store on disk "
            "or on a server"
        )


def on_disk(url: str) -> bool:
    return url.partition("://")[0].lower() in ("sqlite", "file")


# --- people -------------------------------------------------------------------------------------


def confirm(about: str, question: str) -> None:
    """Asked on stderr: stdout is for the answer."""
    sys.stderr.write(f"{show.clean(about)}\n{show.clean(question)} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise typer.Abort
