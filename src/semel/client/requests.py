"""An adapter for requests: a key per logical request, and tries that are safe.

    session = requests.Session()
    session.mount("https://", IdempotentAdapter())
    session.post("https://shop.example/orders", json=order, timeout=5)

requests follows redirects above its adapter, with a copy of the request. The key is set on the
request itself, so that a 307 or 308 takes it along; a GET that a 303 leads to arrives with it,
and loses it here.

requests waits for ever unless it is told otherwise: without `timeout` an answer that got lost is
waited for, and never asked for again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

try:
    import requests
    from requests.adapters import DEFAULT_POOLBLOCK, DEFAULT_POOLSIZE, HTTPAdapter
except ImportError as error:
    from semel.errors import SettingsError

    raise SettingsError("requests is not installed: pip install 'semel[requests]'") from error

from semel.client.flow import HELD, METHODS, Sender, World
from semel.client.intents import HEADER, Intents, said
from semel.client.retry import Head, Patience, head_of
from semel.colour import run

__all__ = ["IdempotentAdapter"]

# A body that breaks off is a ChunkedEncodingError, chunked or not.
FAULTS: Final = (
    requests.exceptions.ConnectionError,
    requests.exceptions.Timeout,
    requests.exceptions.ChunkedEncodingError,
)


# Statuses without a body, and how urllib3 calls the version in which others tell its length.
BARE: Final = frozenset({204, 304})
HTTP_1_1: Final = 11


class IdempotentAdapter(HTTPAdapter):
    """Sends as often as it takes.

    `methods` are those that get a key; a key the caller has set is kept. `intents` are looked up
    for the caller's keys. `world` is time and chance, for tests.
    """

    __attrs__ = [*HTTPAdapter.__attrs__, "_sender"]  # noqa: RUF012 - what a session pickles

    def __init__(
        self,
        *,
        patience: Patience | None = None,
        methods: Collection[str] = METHODS,
        intents: Intents | None = None,
        world: World | None = None,
        pool_connections: int = DEFAULT_POOLSIZE,
        pool_maxsize: int = DEFAULT_POOLSIZE,
        pool_block: bool = DEFAULT_POOLBLOCK,
    ) -> None:
        self._sender = Sender(
            patience=patience, methods=methods, intents=intents, world=world or World()
        )
        super().__init__(pool_connections, pool_maxsize, pool_block=pool_block)

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: float | tuple[float, float] | tuple[float, None] | None = None,
        verify: bool | str = True,
        cert: bytes | str | tuple[bytes | str, bytes | str] | None = None,
        proxies: Mapping[str, str] | None = None,
    ) -> requests.Response:
        def once() -> requests.Response:
            return HTTPAdapter.send(self, request, stream, timeout, verify, cert, proxies)

        return run(self._sender.send(_Wire(request, once, stream=stream)))


class _Bound(str):
    """A key that has been tied to an intent. A redirect's copy of the headers still has it."""

    __slots__ = ()


class _Wire:
    def __init__(
        self,
        request: requests.PreparedRequest,
        once: Callable[[], requests.Response],
        *,
        stream: bool,
    ) -> None:
        self.request = request
        self.method = (request.method or "").upper()
        self.url = request.url or ""
        self._once = once
        self._stream = stream

    @property
    def key(self) -> str | None:
        header: str | bytes | None = self.request.headers.get(HEADER)
        return said(header.decode("latin-1") if isinstance(header, bytes) else header)

    def set_key(self, header: str | None) -> None:
        if header is not None:
            self.request.headers[HEADER] = header
        else:
            self.request.headers.pop(HEADER, None)

    @property
    def is_bound(self) -> bool:
        return isinstance(self.key, _Bound)

    def mark_bound(self) -> None:
        self.set_key(_Bound(self.key))

    async def body(self) -> bytes | None:
        body: Any = self.request.body
        if hasattr(body, "read") and self._is_small():
            body = self.request.body = body.read()
            # Else a redirect rewinds what has become bytes, and fails.
            self.request._body_position = None  # type: ignore[attr-defined]  # noqa: SLF001
        if body is None:
            return b""
        if isinstance(body, str):
            return body.encode()
        return bytes(body) if isinstance(body, bytes | bytearray) else None

    def _is_small(self) -> bool:
        length = self.request.headers.get("Content-Length", "")
        return length.isdecimal() and int(length) <= HELD

    async def send(self, *, whole: bool) -> requests.Response:
        response = self._once()
        if whole and not self._stream:
            try:
                response.content  # noqa: B018 - kept there: the session reads it again
            except BaseException:
                response.close()
                raise
        return response

    def head(self, response: requests.Response, wall_s: float) -> Head:
        body = response.content if self._was_read(response) else None
        cut = body == b"" and self._may_be_cut(response)
        return head_of(response.status_code, response.headers, wall_s=wall_s, body=body, cut=cut)

    def _may_be_cut(self, response: requests.Response) -> bool:
        """http.client takes a head that breaks off for a whole one: without a length, mostly."""
        wants_length = self.method != "HEAD" and response.status_code not in BARE
        length = response.headers.get("Content-Length", "").isdecimal()
        chunks = response.headers.get("Transfer-Encoding", "").lower().endswith("chunked")
        return wants_length and not (length or chunks) and response.raw.version == HTTP_1_1

    def _was_read(self, response: requests.Response) -> bool:
        return response._content_consumed is True  # type: ignore[attr-defined]  # noqa: SLF001

    def is_fault(self, error: Exception) -> bool:
        return isinstance(error, FAULTS)

    async def close(self, response: requests.Response) -> None:
        response.close()
