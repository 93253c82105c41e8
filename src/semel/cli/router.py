"""`semel router`: from the workers' store to the gateways', until it is told to end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

import typer

from semel.brokers import connect as connect_broker
from semel.bus import Router, Stages
from semel.bus.router import BATCH, SHARDS
from semel.bus.stages import MOST_SEQ
from semel.cli import disk, process
from semel.cli.command import refuse_empty, reporting
from semel.cli.process import GRACE, Grace, Http, Quiet
from semel.cli.relay import Lease, lease_of, refuse_memory_broker
from semel.ports import Broker, Store
from semel.stores import connect

__all__ = ["Domain", "router"]

Domain = Annotated[str, typer.Option(help="The jobs' domain, as the publishers have it.")]


def router(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            show_default=False,
            help="The workers' store, e.g. redis://workers; with --topic, a broker.",
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            show_default=False,
            help="The gateways' store, e.g. redis://gateways.",
        ),
    ],
    domain: Domain = "scan",
    shards: Annotated[
        int, typer.Option(help="How many shards the publishers have; a broker has its own.", min=1)
    ] = SHARDS,
    topic: Annotated[
        str, typer.Option(help="The topic of a broker that has the events.", show_default=False)
    ] = "",
    last: Annotated[
        str, typer.Option(metavar="STAGE", help="The last stage, which ends a job.")
    ] = "done",
    final: Annotated[
        int | None,
        typer.Option(
            metavar="SEQ",
            min=0,
            max=MOST_SEQ // 2,
            show_default=False,
            help="Number from which an event of the last stage ends a job, as in Stages(final=51). "
            "Default: each event of the last stage ends it.",
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            help="The routers' name: those of one source share one; else the domain.",
            show_default=False,
        ),
    ] = "",
    batch: Annotated[int, typer.Option(help="Route so many at a time.", min=1)] = BATCH,
    lease: Lease = "10s",
    http: Http = "",
    grace: Grace = GRACE,
    quiet: Quiet = False,
) -> None:
    """Bring jobs' events to whoever watches, until it is told to end."""
    lease_s = lease_of(lease)

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Router]:
        origin: Broker | Store = connect_broker(source) if topic else connect(disk.meant(source))
        store = connect(disk.meant(target))
        try:
            yield Router(
                origin,  # type: ignore[arg-type]  # a store without a log is refused there
                store,  # type: ignore[arg-type]
                domain=domain,
                shards=None if topic else shards,
                topic=topic or None,
                stages=Stages({last: (0, final or 0)}, final=final),
                name=name or None,
                batch=batch,
                lease_s=lease_s,
            )
        finally:
            await origin.aclose()
            await store.aclose()

    with reporting(target):
        refuse_empty(target)
        if topic:
            refuse_memory_broker(source)
        else:
            refuse_empty(source)
        process.run(
            opened,
            about=f"from {source} to {target}",
            http=http,
            grace=grace,
            quiet=quiet,
            urls=(source, target),
        )
