"""Transports for httpx: a key per logical request, and tries that are safe.

    with httpx.Client(transport=IdempotentTransport()) as client:
        client.post("https://shop.example/orders", json=order)

httpx follows redirects above its transport. The key is set on the request itself, so that a
307 or 308 takes it along; a GET that a 303 leads to arrives with it, and loses it here. It stays
on the request: the same `Request` sent again is the same logical request.

The client reads an answer's body after the transport has handed it on, too late for another try.
So a body of known, small length and any JSON is read here; a stream is left a stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator
from typing import Final, TypeVar

try:
    import anyio
    import httpx
    from anyio import to_thread
except ImportError as error:
    from semel.errors import SettingsError

    raise SettingsError("httpx is not installed: pip install 'semel[httpx]'") from error

from semel.client.flow import HELD, METHODS, Sender, World
from semel.client.intents import HEADER, Intents, said
from semel.client.retry import Head, Patience, head_of, is_problem, media_type
from semel.colour import run

__all__ = ["AsyncIdempotentTransport", "IdempotentTransport"]

T = TypeVar("T")

# Where a request notes that its key has been tied to an intent: a redirect inherits extensions.
BOUND: Final = "semel.bound"

# What trying again does not mend: a scheme nobody speaks, a request that breaks the protocol.
HOPELESS: Final = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)


class AsyncWorld(World):
    """Time for async code, on whichever loop httpx runs."""

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds)

    async def aside(self, work: Callable[[], T]) -> T:
        return await to_thread.run_sync(work)


class IdempotentTransport(httpx.BaseTransport):
    """Sends through `transport` (an `httpx.HTTPTransport()` unless given), as often as it takes.

    `methods` are those that get a key; a key the caller has set is kept. `intents` are looked up
    for the caller's keys. `world` is time and chance, for tests.
    """

    def __init__(
        self,
        transport: httpx.BaseTransport | None = None,
        *,
        patience: Patience | None = None,
        methods: Collection[str] = METHODS,
        intents: Intents | None = None,
        world: World | None = None,
    ) -> None:
        self._transport = transport or httpx.HTTPTransport()
        self._sender = Sender(
            patience=patience, methods=methods, intents=intents, world=world or World()
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return run(self._sender.send(_SyncWire(request, self._transport)))

    def close(self) -> None:
        self._transport.close()


class AsyncIdempotentTransport(httpx.AsyncBaseTransport):
    """`IdempotentTransport` for an `httpx.AsyncClient`."""

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        patience: Patience | None = None,
        methods: Collection[str] = METHODS,
        intents: Intents | None = None,
        world: World | None = None,
    ) -> None:
        self._transport = transport or httpx.AsyncHTTPTransport()
        self._sender = Sender(
            patience=patience, methods=methods, intents=intents, world=world or AsyncWorld()
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._sender.send(_AsyncWire(request, self._transport))

    async def aclose(self) -> None:
        await self._transport.aclose()


# --- what both colours share --------------------------------------------------------------------


class _Request:
    def __init__(self, request: httpx.Request) -> None:
        self.request = request
        self.method = request.method.upper()
        self.url = str(request.url)

    @property
    def key(self) -> str | None:
        return said(self.request.headers.get(HEADER))

    def set_key(self, header: str | None) -> None:
        if header is not None:
            self.request.headers[HEADER] = header
        else:
            self.request.headers.pop(HEADER, None)

    @property
    def is_bound(self) -> bool:
        key = self.key
        return key is not None and self.request.extensions.get(BOUND) == key

    def mark_bound(self) -> None:
        # A new dict: the caller may use theirs for another request.
        self.request.extensions = {**self.request.extensions, BOUND: self.key}

    def can_be_held(self) -> bool:
        return isinstance(self.request.stream, httpx.ByteStream) or _is_small(self.request.headers)

    def head(self, response: httpx.Response, wall_s: float) -> Head:
        return head_of(
            response.status_code, response.headers, wall_s=wall_s, body=_decoded(response)
        )

    def is_fault(self, error: Exception) -> bool:
        return isinstance(error, httpx.TransportError) and not isinstance(error, HOPELESS)


def _is_small(headers: httpx.Headers) -> bool:
    length = headers.get("Content-Length", "")
    return length.isdecimal() and int(length) <= HELD


def _can_be_whole(response: httpx.Response) -> bool:
    """Is its body neither large nor a stream, nor in memory already?"""
    if isinstance(response.stream, httpx.ByteStream):
        return False
    if "Content-Length" in response.headers:
        return _is_small(response.headers)
    kind = media_type(response.headers)
    return kind == "application/json" or kind.endswith("+json")


def _decoded(response: httpx.Response) -> bytes | None:
    """A problem's body, if it is in memory. From a copy: only the client may read this one."""
    if not (is_problem(response.headers) and isinstance(response.stream, httpx.ByteStream)):
        return None
    try:
        copy = httpx.Response(200, headers=response.headers, content=b"".join(response.stream))
    except httpx.DecodingError:
        return None
    return copy.content


# --- sync ---------------------------------------------------------------------------------------


class _SyncWire(_Request):
    def __init__(self, request: httpx.Request, transport: httpx.BaseTransport) -> None:
        super().__init__(request)
        self._transport = transport

    async def body(self) -> bytes | None:
        return self.request.read() if self.can_be_held() else None

    async def send(self, *, whole: bool) -> httpx.Response:
        response = self._transport.handle_request(self.request)
        if whole and _can_be_whole(response):
            response.stream = _read(response)
        return response

    async def close(self, response: httpx.Response) -> None:
        response.close()


def _read(response: httpx.Response) -> httpx.SyncByteStream:
    stream = response.stream
    assert isinstance(stream, httpx.SyncByteStream)
    parts: list[bytes] = []
    chunks, size = iter(stream), 0
    try:
        for chunk in chunks:
            parts.append(chunk)
            size += len(chunk)
            if size > HELD:
                return _Rest(parts, chunks, stream)
    except BaseException:
        stream.close()
        raise
    stream.close()
    return httpx.ByteStream(b"".join(parts))


class _Rest(httpx.SyncByteStream):
    """What was read before it got too much, then what follows."""

    def __init__(
        self, parts: list[bytes], chunks: Iterator[bytes], stream: httpx.SyncByteStream
    ) -> None:
        self._parts = parts
        self._chunks = chunks
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        yield from self._parts
        yield from self._chunks

    def close(self) -> None:
        self._stream.close()


# --- async --------------------------------------------------------------------------------------


class _AsyncWire(_Request):
    def __init__(self, request: httpx.Request, transport: httpx.AsyncBaseTransport) -> None:
        super().__init__(request)
        self._transport = transport

    async def body(self) -> bytes | None:
        return await self.request.aread() if self.can_be_held() else None

    async def send(self, *, whole: bool) -> httpx.Response:
        response = await self._transport.handle_async_request(self.request)
        if whole and _can_be_whole(response):
            response.stream = await _aread(response)
        return response

    async def close(self, response: httpx.Response) -> None:
        await response.aclose()


async def _aread(response: httpx.Response) -> httpx.AsyncByteStream:
    stream = response.stream
    assert isinstance(stream, httpx.AsyncByteStream)
    parts: list[bytes] = []
    chunks, size = aiter(stream), 0
    try:
        async for chunk in chunks:
            parts.append(chunk)
            size += len(chunk)
            if size > HELD:
                return _AsyncRest(parts, chunks, stream)
    except BaseException:
        await stream.aclose()
        raise
    await stream.aclose()
    return httpx.ByteStream(b"".join(parts))


class _AsyncRest(httpx.AsyncByteStream):
    """What was read before it got too much, then what follows."""

    def __init__(
        self, parts: list[bytes], chunks: AsyncIterator[bytes], stream: httpx.AsyncByteStream
    ) -> None:
        self._parts = parts
        self._chunks = chunks
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        async for chunk in self._chunks:
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
