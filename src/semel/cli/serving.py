"""An ASGI app in a server of its own: what `semel gateway` and `semel rooms` have in common."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semel.cli.connections import Waiting, bounded, frames_bounded
from semel.colour import ASYNC, keep
from semel.errors import SettingsError, StoreUnavailableError
from semel.failures import OnceAMinute
from semel.http.asgi import ASGIApp
from semel.http.sse import Gateway
from semel.http.ws import RoomDoor
from semel.ports import LogStore

if TYPE_CHECKING:
    import uvicorn

__all__ = [
    "HeadTimeout",
    "PerAddress",
    "Serving",
    "allow_files",
    "listening",
    "loop",
    "refuse_without_server",
    "url_of",
]

log = logging.getLogger("semel")

HeadTimeout = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="How long a connection may take to send a whole request head before it is closed.",
    ),
]
PerAddress = Annotated[
    int,
    typer.Option(
        help="How many connections of one client address may wait for a whole request head; of "
        "more, the one that has waited longest is closed.",
        min=1,
    ),
]

# Connections that nobody has accepted yet: when everybody comes back, they come within a second.
BACKLOG = 4096

# Connections that asyncio accepts in one turn of its loop (its `backlog`). A connection in excess
# is closed a few turns later, so the accepts of these turns have to fit into the spare descriptors:
# asyncio stops accepting for a second when it runs out of them.
ACCEPTS = 16

# What is left when the drain is over has had its time; it is cancelled.
LEFT_S = 2


# Number of file descriptors for everything besides the connections that are served: connections in
# excess, connections to the store, files of libraries.
OTHER_FILES = 256

# How long a connection may be idle after a response, in seconds: uvicorn's own default.
KEEP_ALIVE_S = 5.0

# A stream that nobody has.
NOBODYS = "semel:nobody"


class Serving:
    """A gateway, or a door to rooms, and the server it runs in. `app` is what that serves.

    `at` tells people where to find what is served.
    """

    def __init__(
        self,
        made: Gateway | RoomDoor,
        app: ASGIApp,
        sock: socket.socket,
        at: str,
        drain_s: float,
        waiting: Waiting,
        **settings: Any,
    ) -> None:
        self._made = made
        self._sock = sock
        self._drain_s = drain_s
        self._server = _server(app, waiting, **settings)
        self.at = at
        self.store: LogStore = made.store
        self.shown = made.shown
        self.status: Any = made.status

    async def run(self) -> None:
        # A store that does not answer is waited for; one that has no tables never will.
        with contextlib.suppress(StoreUnavailableError):
            await self.store.log(ASYNC).heads([NOBODYS])
        with _logged_once_a_minute("uvicorn.error", "asyncio"):
            await self._server.serve(sockets=[self._sock])

    def stop(self) -> None:
        keep(asyncio.ensure_future(self._stop()))

    async def _stop(self) -> None:
        await self._made.drain(self._drain_s)
        self._server.should_exit = True


@contextlib.contextmanager
def _logged_once_a_minute(*names: str) -> Iterator[None]:
    """Pass each warning or error of these loggers at most once a minute.

    uvicorn and asyncio would log every request that is malformed or asks for an upgrade.
    """
    once = OnceAMinute()
    for name in names:
        logging.getLogger(name).addFilter(once)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(once)


def _server(app: ASGIApp, waiting: Waiting, **settings: Any) -> uvicorn.Server:
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    if settings.get("ws") == "websockets-sansio":
        from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

        settings["ws"] = frames_bounded(WebSocketsSansIOProtocol, waiting)

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """It is told to end by whoever runs it: signals are theirs."""
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            # It has called `listen(ACCEPTS)`; the kernel's queue has to hold more.
            for each in sockets or ():
                each.listen(BACKLOG)

    config = uvicorn.Config(
        app,
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=ACCEPTS,
        timeout_graceful_shutdown=LEFT_S,
        **{
            "http": bounded(AutoHTTPProtocol, waiting),
            "timeout_keep_alive": min(KEEP_ALIVE_S, waiting.head_timeout_s),
            **settings,
        },
    )
    return Server(config)


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
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


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}"


def refuse_without_server(extra: str, *needed: str) -> None:
    for name in ("uvicorn", *needed):
        if find_spec(name) is None:
            raise SettingsError(f"{name} is not installed: pip install 'semel[{extra}]'")


def allow_files(connections: int) -> int:
    """Raise the soft limit of open files if it is too low; return how many connections it allows.

    Never more than `connections`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    allowed = min(connections, max(files - OTHER_FILES, files // 4, 1))
    if allowed == connections:
        return connections
    log.warning(
        "semel: this process may open %d files, which is enough for %d connections, not %d; raise "
        "the limit (ulimit -n %d), or give --connections %d",
        files,
        allowed,
        connections,
        wanted,
        allowed,
    )
    return allowed


def loop() -> Callable[[], Any] | None:
    """The faster one, where it is installed."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop
