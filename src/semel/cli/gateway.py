"""`semel gateway`: jobs as server-sent events, until it is told to end."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated

import typer

from semel.cli import disk, process
from semel.cli.application import named
from semel.cli.command import Url, refuse_empty, reporting, seconds, seconds_or_forever
from semel.cli.connections import HEAD_TIMEOUT_S, PER_ADDRESS, Waiting
from semel.cli.process import GRACE, Grace, Http, Quiet
from semel.cli.router import Domain
from semel.cli.serving import (
    HeadTimeout,
    PerAddress,
    Serving,
    allow_files,
    listening,
    loop,
    refuse_without_server,
    url_of,
)
from semel.errors import SettingsError
from semel.http.sse import Gateway, Limits, Tickets, abortable
from semel.ports import LogStore
from semel.settings import as_log_store

__all__ = ["gateway"]

log = logging.getLogger("semel")

LIMITS = Limits()


def gateway(
    url: Url = "",
    domain: Domain = "scan",
    host: Annotated[
        str, typer.Option(help="Where to listen; 0.0.0.0 to be reached from other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    base: Annotated[
        str, typer.Option(metavar="PATH", help="Jobs are below it.", show_default=False)
    ] = "",
    authorise: Annotated[
        str,
        typer.Option(
            metavar="MODULE:NAME",
            show_default=False,
            help="Your function of a request and a job's id: who may see it. Else, everybody may.",
        ),
    ] = "",
    project: Annotated[
        str,
        typer.Option(
            metavar="MODULE:NAME",
            show_default=False,
            help="Your function of an event and a principal: what they are shown of it.",
        ),
    ] = "",
    tickets: Annotated[
        bool, typer.Option("--tickets", help="Take one-time tickets, as ?ticket=.")
    ] = False,
    ticket_within: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            show_default=False,
            help="The within_s of Tickets in the program that issues them; a used ticket is "
            "remembered for twice as long. Default: 30s.",
        ),
    ] = "",
    reauthorise: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Interval between calls of --authorise for a connected viewer; forever: it is "
            "called only at the connect.",
        ),
    ] = "1m",
    cors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            show_default=False,
            help="An origin whose pages may read, or *; may be given again.",
        ),
    ] = None,
    credentials: Annotated[
        bool, typer.Option("--credentials", help="They may read with their visitors' cookies.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Let those wait who ask for a job that is not there yet.")
    ] = False,
    heartbeat: Annotated[
        str, typer.Option(metavar="TIME", help="How often there is a sign of life.")
    ] = "15s",
    max_age: Annotated[
        str, typer.Option(metavar="TIME", help="How old a connection gets.")
    ] = "10m",
    retry_ms: Annotated[
        str,
        typer.Option(
            metavar="FROM-TO",
            help="How many milliseconds a browser waits before it reconnects: a random number "
            "between the two.",
        ),
    ] = "500-2500",
    connections: Annotated[
        int, typer.Option(help="So many at once, and no more.", min=1)
    ] = LIMITS.connections,
    per_principal: Annotated[
        int, typer.Option(help="Connections of one principal at once.", min=1)
    ] = LIMITS.per_principal,
    accepts_per_s: Annotated[
        float,
        typer.Option(help="New streams per second on average; a burst may have twice as many."),
    ] = LIMITS.accepts_per_s,
    behind_events: Annotated[
        int,
        typer.Option(
            help="Events that may wait for a viewer that reads nothing. With more, it is "
            "disconnected.",
            min=1,
        ),
    ] = LIMITS.behind_events,
    behind_bytes: Annotated[
        int, typer.Option(help="The same in bytes.", min=1)
    ] = LIMITS.behind_bytes,
    write_within: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="How long a viewer may read nothing, before it is disconnected."
        ),
    ] = f"{LIMITS.write_within_s:g}s",
    per_address: PerAddress = PER_ADDRESS,
    head_timeout: HeadTimeout = f"{HEAD_TIMEOUT_S:g}s",
    drain: Annotated[
        str, typer.Option(metavar="TIME", help="How long connections are closed, told to end.")
    ] = "10s",
    http: Http = "",
    grace: Grace = GRACE,
    quiet: Quiet = False,
) -> None:
    """Show jobs to browsers as they happen, until it is told to end."""
    heartbeat_s, max_age_s = seconds("--heartbeat", heartbeat), seconds("--max-age", max_age)
    drain_s, head_timeout_s = seconds("--drain", drain), seconds("--head-timeout", head_timeout)
    reauthorise_s = seconds_or_forever("--reauthorise", reauthorise)
    limits = Limits(
        connections,
        per_principal,
        accepts_per_s,
        behind_events,
        behind_bytes,
        seconds("--write-within", write_within),
    )

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Serving]:
        if not (authorise or tickets):
            log.warning(
                "semel: everyone who knows a job's id may read it; to change that, give "
                "--authorise MODULE:NAME or --tickets"
            )
        allowed = allow_files(connections)
        store = as_log_store(disk.meant(url))
        try:
            made = Gateway(
                store,
                domain=domain,
                base=base,
                authorise=named(authorise, "shop.views:viewer_of") if authorise else None,
                project=named(project, "shop.views:shown_to") if project else None,
                tickets=_tickets(store, ticket_within) if tickets else None,
                cors=cors,
                credentials=credentials,
                unknown="wait" if wait else "refuse",
                heartbeat_s=heartbeat_s,
                max_age_s=max_age_s,
                reauthorise_s=reauthorise_s,
                retry_ms=_retry_ms(retry_ms),
                limits=replace(limits, connections=allowed),
            )
            with listening(host, port) as sock:
                at = f"jobs at {url_of(sock)}{base}/JOB_ID"
                waiting = Waiting(allowed, per_address, head_timeout_s)
                yield Serving(made, abortable(made), sock, at, drain_s, waiting, ws="none")
            await made.aclose()
        finally:
            await store.aclose()

    with reporting(url):
        refuse_empty(url)
        refuse_without_server("gateway")
        if ticket_within and not tickets:
            raise SettingsError("--ticket-within needs --tickets")
        process.run(
            opened,
            about=f"{domain} of {url}",
            http=http,
            grace=grace,
            quiet=quiet,
            urls=(url,),
            loop=loop(),
        )


def _tickets(store: LogStore, within: str) -> Tickets:
    return Tickets(store, within_s=seconds("--ticket-within", within)) if within else Tickets(store)


def _retry_ms(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,9})(?:[-,]([0-9]{1,9}))?", text)
    if found is None:
        raise SettingsError(f"--retry-ms {text}: write 500-2500, or one number")
    return int(found[1]), int(found[2] or found[1])
