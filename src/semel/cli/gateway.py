"""`semel gateway`: jobs as server-sent events, until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semel.cli import disk, process
from semel.cli.application import named
from semel.cli.command import Url, refuse_empty, reporting, seconds
from semel.cli.process import GRACE, Grace, Http, Quiet
from semel.cli.router import Domain
from semel.colour import ASYNC, keep
from semel.errors import SettingsError, StoreUnavailableError
from semel.http.sse import Gateway, GatewayStatus, Limits, Tickets, abortable
from semel.ports import LogStore
from semel.settings import as_log_store

if TYPE_CHECKING:
    import uvicorn

__all__ = ["gateway"]

# Connections that nobody has accepted yet: when everybody comes back, they come within a second.
BACKLOG = 4096

# What is left when the drain is over has had its time; it is cancelled.
LEFT_S = 2

# A stream that nobody has.
NOBODYS = "semel:nobody"


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
    connections: Annotated[
        int, typer.Option(help="So many at once, and no more.", min=1)
    ] = Limits().connections,
    drain: Annotated[
        str, typer.Option(metavar="TIME", help="How long connections are closed, told to end.")
    ] = "10s",
    http: Http = "",
    grace: Grace = GRACE,
    quiet: Quiet = False,
) -> None:
    """Show jobs to browsers as they happen, until it is told to end."""
    heartbeat_s, max_age_s = seconds("--heartbeat", heartbeat), seconds("--max-age", max_age)
    drain_s = seconds("--drain", drain)

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[_Serving]:
        store = as_log_store(disk.meant(url))
        try:
            made = Gateway(
                store,
                domain=domain,
                base=base,
                authorise=named(authorise, "shop.views:viewer_of") if authorise else None,
                project=named(project, "shop.views:shown_to") if project else None,
                tickets=Tickets(store) if tickets else None,
                cors=cors,
                credentials=credentials,
                unknown="wait" if wait else "refuse",
                heartbeat_s=heartbeat_s,
                max_age_s=max_age_s,
                limits=Limits(connections=connections),
            )
            with _listening(host, port) as sock:
                yield _Serving(made, sock, base, drain_s)
            await made.aclose()
        finally:
            await store.aclose()

    with reporting(url):
        refuse_empty(url)
        if find_spec("uvicorn") is None:
            raise SettingsError("uvicorn is not installed: pip install 'semel[gateway]'")
        _allow_files(connections)
        process.run(
            opened,
            about=f"{domain} of {url}",
            http=http,
            grace=grace,
            quiet=quiet,
            urls=(url,),
            loop=_loop(),
        )


class _Serving:
    """A gateway, and the server it runs in."""

    def __init__(self, made: Gateway, sock: socket.socket, base: str, drain_s: float) -> None:
        self._gateway = made
        self._base = base
        self._sock = sock
        self._drain_s = drain_s
        self._server = _server(made)

    @property
    def store(self) -> LogStore:
        return self._gateway.store

    @property
    def shown(self) -> str:
        return self._gateway.shown

    @property
    def at(self) -> str:
        """Its URL."""
        host, port = self._sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}{self._base}"

    def status(self) -> GatewayStatus:
        return self._gateway.status()

    async def run(self) -> None:
        # A store that does not answer is waited for; one that has no tables never will.
        with contextlib.suppress(StoreUnavailableError):
            await self.store.log(ASYNC).heads([NOBODYS])
        await self._server.serve(sockets=[self._sock])

    def stop(self) -> None:
        keep(asyncio.ensure_future(self._stop()))

    async def _stop(self) -> None:
        await self._gateway.drain(self._drain_s)
        self._server.should_exit = True


def _server(made: Gateway) -> uvicorn.Server:
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """It is told to end by whoever runs it: signals are theirs."""
            yield

    config = uvicorn.Config(
        abortable(made),
        loop="none",
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=LEFT_S,
    )
    return Server(config)


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsError(
            f"cannot listen at {host}:{port}: {error.strerror or error}; choose another --host or "
            "--port"
        ) from error
    with sock:
        yield sock


def _allow_files(connections: int) -> None:
    """A connection is an open file, and most systems begin with few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _loop() -> Callable[[], Any] | None:
    """The faster one, where it is installed."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop
