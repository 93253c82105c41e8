"""`semel outbox`: how far behind its relays are, deleting what is published, sharing it anew."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from semel.cli import show
from semel.cli.command import BAD_INPUT, REFUSED, Command, Json, fail, reporting, seconds
from semel.cli.database import Database, open_store
from semel.cli.table import Column
from semel.errors import SettingsError
from semel.messages import SLOTS

if TYPE_CHECKING:
    from semel.stores.sql.outbox_lag import Lag
    from semel.stores.sql.outbox_reading import OutboxReader

__all__ = ["Name", "outbox"]

T = TypeVar("T")

outbox = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Look into an outbox and clean it up."
)

Name = Annotated[str, typer.Option(help="The relays' name: those to one broker share one.")]

Readers = Callable[..., "OutboxReader"]
"""Called with name= and shards=, as OutboxReader is."""


def _with(url: str, work: Callable[[Readers], Coroutine[Any, Any, T]]) -> T:
    """Do the work on the outbox of this URL."""

    async def opened() -> T:
        store = open_store(url)
        from semel.stores.sql.outbox_reading import OutboxReader

        try:
            return await work(lambda **settings: OutboxReader(store, **settings))
        finally:
            await store.aclose()

    with reporting(url):
        return asyncio.run(opened())


# --- looking ------------------------------------------------------------------------------------


@outbox.command(cls=Command)
def status(url: Database = "", as_json: Json = False) -> None:
    """Say how far behind its relays are, and who holds them up."""
    shards, lags = _with(url, _lags)
    if as_json:
        show.print_json(_status_json(shards, lags))
    else:
        _print_status(shards, lags)


async def _lags(readers: Readers) -> tuple[Mapping[str, int], Mapping[str, Lag]]:
    """Of every name; of one that nobody has used yet, if there is no other."""
    shards = await readers().relays() or {"default": 1}
    return shards, {name: await readers(name=name, shards=n).lag() for name, n in shards.items()}


def _status_json(shards: Mapping[str, int], lags: Mapping[str, Lag]) -> show.Json:
    table = next(iter(lags.values()))
    return {
        "relays": [
            {
                "name": name,
                "shards": shards[name],
                "lag_s": lag.age_s,
                "unpublished": lag.unpublished,
                "behind": list(lag.behind),
                "positions": [lag.positions[shard] for shard in sorted(lag.positions)],
            }
            for name, lag in lags.items()
        ],
        "rows": table.rows,
        "bytes": table.bytes,
        "holders": [dataclasses.asdict(holder) for holder in table.holders],
    }


RELAY_COLUMNS = (
    Column("relays", rank=0, least=8),
    Column("shards", rank=3, least=6),
    Column("lag", rank=0, least=8),
    Column("unpublished", rank=1, least=11),
    Column("behind", rank=2, least=8),
    Column("positions", rank=4, least=12),
)
HOLDER_COLUMNS = (
    Column("pid", rank=0, least=5),
    Column("state", rank=2, least=6),
    Column("open", rank=0, least=8),
    Column("query", rank=1, least=20),
)


def _print_status(shards: Mapping[str, int], lags: Mapping[str, Lag]) -> None:
    table = next(iter(lags.values()))
    size = "" if table.bytes is None else f", {table.bytes / 1e6:,.1f} MB"
    show.print_line(f"about {table.rows:,} rows{size}")
    show.print_table(
        RELAY_COLUMNS,
        [
            [
                name,
                str(shards[name]),
                show.span(lag.age_s),
                f"{lag.unpublished:,}",
                ", ".join(lag.behind),
                " ".join(str(lag.positions[shard]) for shard in sorted(lag.positions)),
            ]
            for name, lag in lags.items()
        ],
    )
    if table.holders:
        show.print_line("transactions that relays do not pass:")
        rows = [[str(h.pid), h.state, show.span(h.open_s), h.query] for h in table.holders]
        show.print_table(HOLDER_COLUMNS, rows)


# --- changing -----------------------------------------------------------------------------------


@outbox.command(cls=Command)
def sweep(
    url: Database = "",
    keep: Annotated[str, typer.Option(metavar="TIME", help="Only what is older than this.")] = "1h",
    limit: Annotated[int, typer.Option(help="At most so many.", min=1)] = 1_000_000,
    as_json: Json = False,
) -> None:
    """Delete events that all relays have published, and count them."""
    keep_s = seconds("--keep", keep)
    swept = _with(url, lambda readers: readers().sweep(keep_s=keep_s, limit=limit))
    if as_json:
        show.print_json({"swept": swept})
    else:
        show.print_line(f"{swept:,} published event{'' if swept == 1 else 's'} deleted")


@outbox.command(cls=Command)
def reshard(
    url: Database = "",
    shards: Annotated[
        int | None,
        typer.Option(help="How many there are to be.", min=1, max=SLOTS, show_default=False),
    ] = None,
    name: Name = "default",
    as_json: Json = False,
) -> None:
    """Change the number of shards, with all relays stopped."""
    if shards is None:
        fail("say how many shards there are to be: --shards 8", BAD_INPUT)

    async def work(readers: Readers) -> str | None:
        if name not in await readers().relays():
            return f"no relay called {name!r} has read this outbox; it takes the number it is given"
        try:
            await readers(name=name).reshard(shards)
        except SettingsError as refusal:
            if type(refusal) is not SettingsError:  # no tables, for one
                raise
            return str(refusal)
        return None

    why = _with(url, work)
    if as_json:
        show.print_json({"resharded": why is None, "why": why})
    elif why is None:
        show.print_line(f"{shards} shards; start the relays with a broker that has as many")
    else:
        show.print_error(why)
    if why is not None:
        raise typer.Exit(REFUSED)
