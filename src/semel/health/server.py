"""A very small HTTP server for probes: GET and HEAD, one request per connection.

Whoever probes is a machine of ours, and still nothing it sends may cost us more than a few
kilobytes and seconds: a head that is too long or too slow is refused, and so is the one connection
too many.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import urlsplit

from semel.errors import SettingsError

__all__ = ["Answer", "listening"]

log = logging.getLogger("semel")

# Proxies send long heads, and nobody probes with one that is longer.
HEAD_BYTES = 8192
WITHIN_S = 5.0
CONNECTIONS = 64


class Answer(NamedTuple):
    """What a path answers."""

    status: HTTPStatus
    body: bytes
    type: str = "text/plain; charset=utf-8"


Route = Callable[[], Awaitable[Answer]]


@contextlib.asynccontextmanager
async def listening(address: str, routes: dict[str, Route]) -> AsyncIterator[str]:
    """Answer at `HOST:PORT` while the block runs; gives the URL. Port 0 takes a free one."""
    host, port = _parsed(address)
    server = _Server(routes)
    try:
        sockets = await asyncio.start_server(server.serve, host, port, limit=HEAD_BYTES)
    except OSError as error:
        raise SettingsError(
            f"cannot listen at {address}: {error.strerror or error}; choose another host or port"
        ) from error
    try:
        yield _url(sockets)
    finally:
        sockets.close()
        await server.close()
        await sockets.wait_closed()


def _parsed(address: str) -> tuple[str, int]:
    host, port = None, None
    with contextlib.suppress(ValueError):
        parts = urlsplit(f"//{address}")
        if parts.netloc == address and parts.username is None:
            host, port = parts.hostname, parts.port
    if not host or port is None:
        raise SettingsError(
            f"{address!r} is not HOST:PORT; write 127.0.0.1:8080, or 0.0.0.0:8080 to be reached "
            "from other machines"
        )
    return host, port


def _url(server: asyncio.Server) -> str:
    host, port = server.sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server:
    def __init__(self, routes: dict[str, Route]) -> None:
        self._routes = routes
        self._open: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Nobody is waited for: a probe that gets no answer asks again."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= CONNECTIONS:
            writer.close()
            return
        self._open.add(task := asyncio.create_task(self._serve(reader, writer)))
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, TimeoutError):  # the other side, gone or too slow
                async with asyncio.timeout(2 * WITHIN_S):
                    method, answer = await self._answer(reader)
                    writer.write(_head(answer))
                    if method != "HEAD":
                        writer.write(answer.body)
                    await writer.drain()
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[str, Answer]:
        try:
            async with asyncio.timeout(WITHIN_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return "", _said(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        except TimeoutError:
            return "", _said(HTTPStatus.REQUEST_TIMEOUT)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError from error
        match head.partition(b"\r\n")[0].decode("latin-1").split(" "):
            case [method, target, version] if version.startswith("HTTP/1."):
                return method, await self._routed(method, target.partition("?")[0])
        return "", _said(HTTPStatus.BAD_REQUEST)

    async def _routed(self, method: str, path: str) -> Answer:
        route = self._routes.get(path)
        if route is None:
            there = ", ".join(self._routes)
            return Answer(HTTPStatus.NOT_FOUND, f"there is {there}\n".encode())
        if method not in ("GET", "HEAD"):
            return _said(HTTPStatus.METHOD_NOT_ALLOWED)
        try:
            return await route()
        except Exception:
            log.exception("semel: %s could not be answered", path)
            return _said(HTTPStatus.INTERNAL_SERVER_ERROR)


def _said(status: HTTPStatus) -> Answer:
    return Answer(status, f"{status.phrase}\n".encode())


def _head(answer: Answer) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
        f"Content-Type: {answer.type}",
        f"Content-Length: {len(answer.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if answer.status is HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append("Allow: GET, HEAD")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
