"""`semel worker`: a Worker of the application's own, until it is told to end."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Annotated, Any

import typer

from semel.cli import process
from semel.cli.application import named, show_trace
from semel.cli.command import reporting
from semel.cli.process import GRACE, Grace, Http, Quiet
from semel.colour import ASYNC
from semel.errors import SemelError, SettingsError, StoreUnavailableError
from semel.worker import Worker

__all__ = ["worker"]


def worker(
    where: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME",
            show_default=False,
            help="A Worker, or a function without arguments that makes one.",
        ),
    ],
    http: Http = "",
    grace: Grace = GRACE,
    quiet: Quiet = False,
) -> None:
    """Handle messages with a Worker of yours, until it is told to end."""
    found = named(where, "shop.tasks:worker", _hint)

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Worker]:
        made = await _made(found, where)
        try:
            yield made
        finally:
            for each in (made.broker, made.inbox, made.store):
                close = getattr(each, "aclose", None)  # an inbox of theirs may have none
                if close is not None:
                    await close()

    with reporting(""):
        process.run(
            opened,
            check=_refuse_without_tables,
            about=where,
            http=http,
            grace=grace,
            quiet=quiet,
        )


def _hint(module: ModuleType) -> str:
    workers = [name for name, each in vars(module).items() if isinstance(each, Worker)]
    if not workers:
        return "; name a Worker, or a function that makes one"
    return f"; its workers are {', '.join(f'{module.__name__}:{name}' for name in workers)}"


async def _made(found: Any, where: str) -> Worker:
    made = found
    if callable(found) and not isinstance(found, Worker):
        _refuse_arguments(found, where)
        made = await _called(found, where)
    if isinstance(made, Worker):
        return made
    gives = "is" if made is found else "gives"
    raise SettingsError(
        f"{where} {gives} a {type(made).__name__}, not a Worker; name a Worker, or a function "
        "without arguments that makes one"
    )


async def _called(make: Any, where: str) -> Any:
    try:
        made = make()
        return await made if inspect.isawaitable(made) else made
    except SemelError:  # which says what to do
        raise
    except Exception as error:  # noqa: BLE001 - whatever the application does there
        trace = error.__traceback__
        show_trace(f"{where} made no worker", error.with_traceback(trace and trace.tb_next))


async def _refuse_without_tables(made: Worker) -> None:
    """What does not answer is waited for by the worker; what answers and has no tables never will.

    Asked in the worker's own words: whether it knows some record, and what waits.
    """
    with contextlib.suppress(StoreUnavailableError):
        await made.store.ledger(ASYNC).look(bytes(32))
        sequences = getattr(made.inbox, "sequences", None)  # which an inbox of yours may lack
        if sequences is not None:
            await sequences(limit=1)


def _refuse_arguments(make: Any, where: str) -> None:
    try:
        inspect.signature(make).bind()
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"{where} cannot be called without arguments ({error}); name a Worker, or a function "
            "without arguments that makes one"
        ) from error
