"""`semel outbox`: how far behind its relays are, deleting what is published, sharing it anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from semel.cli import show
from semel.cli.command import Command, Json, reporting, seconds
from semel.cli.database import Database, open_store

if TYPE_CHECKING:
    from semel.stores.sql.outbox_reading import OutboxReader

__all__ = ["Name", "outbox"]

T = TypeVar("T")

outbox = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Look into an outbox and clean it up."
)

Name = Annotated[str, typer.Option(help="The relays' name: those to one broker share one.")]


def _with(
    url: str, name: str, work: Callable[[OutboxReader], Coroutine[Any, Any, T]], shards: int = 1
) -> T:
    """Do the work on the outbox of this URL."""

    async def opened() -> T:
        store = open_store(url)
        from semel.stores.sql.outbox_reading import OutboxReader

        try:
            return await work(OutboxReader(store, name=name, shards=shards))
        finally:
            await store.aclose()

    with reporting(url):
        return asyncio.run(opened())


@outbox.command(cls=Command)
def status(url: Database = "", name: Name = "default", as_json: Json = False) -> None:
    """Say how far behind the relays are."""
    lag = _with(url, name, lambda reader: reader.lag())
    if as_json:
        show.print_json({"age_s": lag.age_s, "unpublished": lag.unpublished})
        return
    show.print_facts([("lag", show.span(lag.age_s)), ("unpublished", f"{lag.unpublished:,}")])


@outbox.command(cls=Command)
def sweep(
    url: Database = "",
    keep: Annotated[
        str, typer.Option(metavar="TIME", help="Delete what is older than this.")
    ] = "1h",
    limit: Annotated[int, typer.Option(help="Delete at most so many.", min=1)] = 1_000_000,
    as_json: Json = False,
) -> None:
    """Delete published events, chunk by chunk, and count them."""
    keep_s = seconds("--keep", keep)
    swept = _with(url, "default", lambda reader: reader.sweep(keep_s=keep_s, limit=limit))
    if as_json:
        show.print_json({"swept": swept})
    else:
        show.print_line(f"{swept:,} published event{'' if swept == 1 else 's'} deleted")


@outbox.command(cls=Command)
def reshard(
    url: Database = "",
    shards: Annotated[
        int, typer.Option(help="How many shards there are to be.", min=1, show_default=False)
    ] = ...,  # type: ignore[assignment]
    name: Name = "default",
    as_json: Json = False,
) -> None:
    """Divide an outbox into another number of shards, while no relay runs."""
    _with(url, name, lambda reader: reader.reshard(shards))
    if as_json:
        show.print_json({"shards": shards})
    else:
        show.print_line(f"the relays {name!r} share {shards} shards from now on")
