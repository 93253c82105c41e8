"""`semel doctor`: what is wrong between an outbox and the effects, and what to do about it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from semel.brokers import connect
from semel.cli import show
from semel.cli.command import FOREVER, REFUSED, Json, reporting, seconds, seconds_or_forever
from semel.cli.database import Database, open_store
from semel.cli.outbox import Name
from semel.cli.relay import BROKER, refuse_memory_broker
from semel.cli.table import Column
from semel.doctor import Check, Thresholds, examine
from semel.errors import SettingsError
from semel.stores import path_of

__all__ = ["doctor"]

COLUMNS = (
    Column("what", rank=0, least=17),
    Column("verdict", rank=0, least=11),
    Column("figure", rank=0, least=22, folds=True),
    Column("what to do", rank=0, least=22, folds=True),
)


def doctor(
    url: Database = "",
    broker: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar=BROKER,
            show_default=False,
            help="The relays' broker, e.g. redis://localhost?shards=8; its rows need it.",
        ),
    ] = "",
    consumer: Annotated[
        list[str] | None,
        typer.Option(metavar="GROUP", help="Only these groups of workers; may be repeated."),
    ] = None,
    name: Name = "default",
    canary: Annotated[
        bool,
        typer.Option(
            "--canary/--no-canary", help="Send an event through every shard; all else only looks."
        ),
    ] = True,
    wait: Annotated[str, typer.Option(metavar="TIME", help="How long that may take.")] = "10s",
    keep: Annotated[
        str, typer.Option(metavar="TIME", help=f"The relays' own --keep, or {FOREVER}.")
    ] = "1h",
    as_json: Json = False,
) -> None:
    """Examine an outbox, its relays, its broker and what is parked."""
    wait_s = seconds("--wait", wait)
    thresholds = Thresholds(keep_s=seconds_or_forever("--keep", keep))

    async def examined() -> Sequence[Check]:
        store = open_store(url)
        at = connect(broker) if broker else None
        try:
            return await examine(
                store,
                at,
                consumers=consumer or (),
                name=name,
                canary=canary,
                wait_s=wait_s,
                thresholds=thresholds,
            )
        finally:
            if at is not None:
                await at.aclose()
            await store.aclose()

    with reporting(url):
        _refuse_broker(broker)
        checks = [_redacted(check, url, broker) for check in asyncio.run(examined())]
    failed = any(check.verdict == "failed" for check in checks)
    if as_json:
        show.print_json({"ok": not failed, "checks": [dataclasses.asdict(c) for c in checks]})
    else:
        rows = [[check.row, check.verdict, check.figure, check.advice] for check in checks]
        show.print_table(COLUMNS, rows)
    if failed:
        raise typer.Exit(REFUSED)


def _refuse_broker(url: str) -> None:
    """One in a file is made by opening it, and would hide a mistyped path behind "no events"."""
    refuse_memory_broker(url)
    path = path_of(url.partition("?")[0]) if url.startswith("sqlite:") else ""
    if path and not Path(path).exists():
        raise SettingsError(f"there is no broker at {path!r}; check the path in the URL")


def _redacted(check: Check, *urls: str) -> Check:
    figure, advice = check.figure, check.advice
    for url in urls:
        figure, advice = show.redact(figure, url), show.redact(advice, url)
    return Check(check.row, check.verdict, figure, advice)
