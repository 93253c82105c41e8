"""`semel relay`: from an outbox to a broker, until it is told to end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

import typer

from semel.brokers import connect
from semel.cli import process
from semel.cli.command import (
    BAD_INPUT,
    FOREVER,
    fail,
    reporting,
    seconds,
    seconds_or_forever,
)
from semel.cli.database import Database, open_store
from semel.cli.outbox import Name
from semel.cli.process import GRACE, Grace, Http, Quiet
from semel.errors import SettingsError
from semel.relay import BATCH, Relay

__all__ = ["BROKER", "Lease", "lease_of", "refuse_memory_broker", "relay"]

BROKER = "SEMEL_BROKER"
LEAST_LEASE_S = 1.0

Lease = Annotated[
    str, typer.Option(metavar="TIME", help="How long others wait for one that has died.")
]


def relay(
    url: Database = "",
    to: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar=BROKER,
            show_default=False,
            help="The broker, e.g. redis://localhost?shards=8.",
        ),
    ] = "",
    name: Name = "default",
    source: Annotated[
        str, typer.Option(help="The CloudEvents source of what is published.", show_default=False)
    ] = "",
    batch: Annotated[int, typer.Option(help="Publish so many at a time.", min=1)] = BATCH,
    keep: Annotated[
        str,
        typer.Option(
            metavar="TIME", help=f"How long published events stay in the outbox, or {FOREVER}."
        ),
    ] = "1h",
    lease: Lease = "10s",
    notify: Annotated[
        bool, typer.Option("--notify", help="Listen to PostgreSQL's NOTIFY of new events.")
    ] = False,
    http: Http = "",
    grace: Grace = GRACE,
    quiet: Quiet = False,
) -> None:
    """Publish the events of an outbox, until it is told to end."""
    if not to:
        fail(f"give the broker's URL with --to, or set {BROKER}", BAD_INPUT)
    keep_s = seconds_or_forever("--keep", keep)
    lease_s = lease_of(lease)

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Relay]:
        store = open_store(url)
        broker = connect(to)
        try:
            yield Relay(
                store,
                broker,
                name=name,
                source=source,
                batch=batch,
                lease_s=lease_s,
                keep_s=keep_s,
                notify=notify,
            )
        finally:
            await broker.aclose()
            await store.aclose()

    with reporting(url):
        refuse_memory_broker(to)
        process.run(
            opened, about=f"from {url} to {to}", http=http, grace=grace, quiet=quiet, urls=(url, to)
        )


def lease_of(lease: str) -> float:
    lease_s = seconds("--lease", lease)
    if lease_s < LEAST_LEASE_S:
        fail(f"--lease {lease} is too short to be renewed in time; give 1s or more", BAD_INPUT)
    return lease_s


def refuse_memory_broker(to: str) -> None:
    if to.partition("://")[0].lower() == "memory":
        raise SettingsError(
            "a broker in memory is heard by nobody outside this process; give the URL of one on "
            "disk or on a server"
        )
