"""An ASGI app in a server of its own: what `semel gateway` and `semel rooms` have in common."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from semel.colour import ASYNC, keep
from semel.errors import SettingsError, StoreUnavailableError
from semel.http.asgi import ASGIApp
from semel.http.sse import Gateway
from semel.http.ws import RoomDoor
from semel.ports import LogStore

if TYPE_CHECKING:
    import uvicorn

__all__ = ["Serving", "allow_files", "listening", "loop", "refuse_without_server", "url_of"]

# Connections that nobody has accepted yet: when everybody comes back, they come within a second.
BACKLOG = 4096

# What is left when the drain is over has had its time; it is cancelled.
LEFT_S = 2


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
        **settings: Any,
    ) -> None:
        self._made = made
        self._sock = sock
        self._drain_s = drain_s
        self._server = _server(app, **settings)
        self.at = at
        self.store: LogStore = made.store
        self.shown = made.shown
        self.status: Any = made.status

    async def run(self) -> None:
        # A store that does not answer is waited for; one that has no tables never will.
        with contextlib.suppress(StoreUnavailableError):
            await self.store.log(ASYNC).heads([NOBODYS])
        await self._server.serve(sockets=[self._sock])

    def stop(self) -> None:
        keep(asyncio.ensure_future(self._stop()))

    async def _stop(self) -> None:
        await self._made.drain(self._drain_s)
        self._server.should_exit = True


def _server(app: ASGIApp, **settings: Any) -> uvicorn.Server:
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """It is told to end by whoever runs it: signals are theirs."""
            yield

    config = uvicorn.Config(
        app,
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=LEFT_S,
        **settings,
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


def allow_files(connections: int) -> None:
    """A connection is an open file, and most systems begin with few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def loop() -> Callable[[], Any] | None:
    """The faster one, where it is installed."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop
