"""The connection of a feed over httpx, in either colour.

A line makes one call at a time: `connect`, then `read` until it says how the call ended. Whatever
waits, waits no longer than it is told, and `cut` wakes it: from any thread for the sync colour,
from any task for the async one. A call that has been cut is over; the next one is a new call.

The easy mistake in the sync colour is to close a socket that another thread reads: that thread
would go on waiting. It is shut down instead, and closed by whoever reads it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any, Final, Protocol, TypeAlias

try:
    import anyio
    import httpx
except ImportError as error:
    from semel.errors import SettingsError

    raise SettingsError("httpx is not installed: pip install 'semel[httpx]'") from error

from semel.client.feed_rules import OK, Connect, FeedError, Opening
from semel.client.flow import World, is_distrusted
from semel.client.httpx import HOPELESS, AsyncWorld
from semel.client.retry import head_of, media_type
from semel.colour import SYNC
from semel.errors import SettingsError
from semel.values import value

Client: TypeAlias = httpx.Client | httpx.AsyncClient

EVENT_STREAM: Final = "text/event-stream"

# Nobody can be woken who waits for a connection to be made, so nobody waits longer.
CONNECTING_S: Final = 10.0

# What is read of an answer that says why there is no feed.
SAID: Final = 64 << 10

# A connection of one's own is never used for a second request: what is cut is that feed alone.
ALONE: Final = httpx.Limits(max_keepalive_connections=0)

# What a redirect takes along to another place. All else may be a secret between two.
CARRIED: Final = frozenset(
    {"host", "user-agent", "accept", "accept-encoding", "cache-control", "last-event-id"}
)

PORTS: Final = {"http": 80, "https": 443}


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Whose certificates are trusted: the same for all, and a tenth of a second to read."""
    return httpx.create_ssl_context()


@value
class Ending:
    """How a call ended, if not with what was asked for; `reason` says what went wrong, if known."""

    is_time_up: bool = False
    reason: str = ""


CLOSED: Final = Ending()
TIME_UP: Final = Ending(is_time_up=True)


class Line(Protocol):
    """What a feed needs of one colour."""

    world: World

    async def connect(self, step: Connect) -> Opening | Ending: ...

    async def read(self, within_s: float) -> bytes | Ending: ...

    async def pause(self, seconds: float) -> None:
        """Sleep, unless the line is cut."""
        ...

    async def hang_up(self) -> None:
        """End the call, if there is one."""
        ...

    def cut(self) -> None:
        """Wake whoever waits, now and from now on."""
        ...

    async def close(self) -> None: ...

    async def state(self) -> httpx.Response:
        """The answer to a question of its own, read."""
        ...


def is_async(client: Client | None) -> bool:
    """For which colour is this client? Without one: in which colour are we?"""
    if client is not None:
        return isinstance(client, httpx.AsyncClient)
    try:
        anyio.get_current_task()
    except RuntimeError:
        return False
    return True


class _Address:
    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = httpx.URL(url)
        self._headers = headers

    def redirected(self, response: httpx.Response, hops: int, most: int) -> httpx.Request:
        """The request that a redirect asks for."""
        request = response.next_request
        assert request is not None
        if hops >= most:
            status = response.status_code
            raise FeedError(f"there is no end to the redirects: {hops} so far", status=status)
        if not _is_same_place(self._url, request.url):
            for name in set(request.headers) - CARRIED:
                del request.headers[name]
        return request

    def request(self, client: Client, step: Connect) -> httpx.Request:
        url = self._url
        # The server's own compression would hold events back until there is enough of them.
        told = {"Accept": EVENT_STREAM, "Cache-Control": "no-store", "Accept-Encoding": "identity"}
        if step.cursor is not None:
            told["Last-Event-ID"] = step.cursor
        if step.last_seq is not None:
            told_so = b"last_seq=%d" % step.last_seq
            url = url.copy_with(query=url.query + b"&" + told_so if url.query else told_so)
        timeout = httpx.Timeout(step.within_s, connect=min(step.within_s, CONNECTING_S))
        return client.build_request("GET", url, headers={**self._headers, **told}, timeout=timeout)

    def state_request(self, client: Client) -> httpx.Request:
        headers = {**self._headers, "Accept": "application/json", "Cache-Control": "no-store"}
        return client.build_request("GET", self._url, headers=headers)


def _is_same_place(one: httpx.URL, other: httpx.URL) -> bool:
    """May the second be told what is for the first? TLS instead of none is no other place."""
    places = [(url.scheme, url.port or PORTS.get(url.scheme)) for url in (one, other)]
    is_upgrade = places == list(PORTS.items())
    return one.host == other.host and (places[0] == places[1] or is_upgrade)


def _auth(hops: int) -> Any:
    """What a client knows goes to the first place alone, as with httpx's own redirects."""
    return None if hops else httpx.USE_CLIENT_DEFAULT


def opening_of(response: httpx.Response, body: bytes, wall_s: float) -> Opening:
    head = head_of(response.status_code, response.headers, wall_s=wall_s)
    kind = media_type(response.headers)
    return Opening(response.status_code, kind, head.retry_after_s, _detail(kind, body))


def _is_feed(response: httpx.Response) -> bool:
    return response.status_code == OK and media_type(response.headers) == EVENT_STREAM


def _detail(kind: str, body: bytes) -> str:
    """What a problem document says in words; other bodies are pages for people to look at."""
    if not (kind == "application/json" or kind.endswith("+json")):
        return ""
    try:
        document: Any = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(document, dict):
        return ""
    said = document.get("detail") or document.get("title")
    return said if isinstance(said, str) else ""


def _ending_of(error: Exception) -> Ending:
    """How this call ended; what the next one would end with, too, is raised."""
    if isinstance(error, HOPELESS) or is_distrusted(error):
        raise error
    return Ending(isinstance(error, httpx.TimeoutException), _reason_of(error))


def _reason_of(error: BaseException) -> str:
    """The system's own word for it, where there is one: what is wrapped around it says less."""
    chain: list[BaseException] = [error]
    for each in chain:
        if isinstance(each, socket.gaierror):
            return each.strerror or str(each)
        if isinstance(each, OSError) and each.errno and not isinstance(each, ssl.SSLError):
            return os.strerror(each.errno).lower()
        inner = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        chain += (e for e in (each.__cause__, each.__context__, *inner) if e and e not in chain)
    return str(error) or type(error).__name__


# DecodingError: an answer that was compressed, whatever we asked for, and was cut.
FAULTS: Final = (httpx.TransportError, httpx.DecodingError, httpx.StreamError)


# --- sync ---------------------------------------------------------------------------------------


@value
class _Answer:
    response: httpx.Response
    chunks: Iterator[bytes]
    said: bytes


class _Call:
    """One call's socket, to be cut by another thread."""

    def __init__(self) -> None:
        self.is_cut = False
        self.stream: Any = None
        self._answer: Future[_Answer] = Future()

    def trace(self, name: str, told: dict[str, Any]) -> None:
        """Called by httpcore, which knows of a connection before it has a response."""
        if name.endswith((".connect_tcp.complete", ".start_tls.complete")):
            self.has(told.get("return_value"))

    def has(self, stream: Any) -> None:
        self.stream = stream or self.stream
        if self.is_cut:
            self.cut()

    def cut(self) -> None:
        self.is_cut = True
        end = None if self.stream is None else self.stream.get_extra_info("socket")
        if isinstance(end, socket.socket):
            with contextlib.suppress(OSError):
                # Not TLS's own shutdown, which waits for the other side.
                socket.socket.shutdown(end, socket.SHUT_RDWR)
        self._answer.cancel()

    def aside(self, ask: Callable[[], _Answer]) -> _Answer | None:
        """Ask in a thread of its own, and wait for that, or until we are cut: then None.

        A connection that was open before is not known until it answers, so nobody can shut it
        down. Whoever waits is woken instead, and the thread hangs up when its answer comes.
        """
        run = contextvars.copy_context().run
        threading.Thread(target=run, args=(self._ask, ask), daemon=True).start()
        try:
            return self._answer.result()
        except CancelledError:
            return None
        except BaseException:
            self.cut()  # interrupted, say: nobody is there for the answer
            raise

    def _ask(self, ask: Callable[[], _Answer]) -> None:
        try:
            answer = ask()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            with contextlib.suppress(InvalidStateError):
                self._answer.set_exception(error)
            return
        try:
            self._answer.set_result(answer)
        except InvalidStateError:
            answer.response.close()


class SyncLine:
    """Blocks the thread that reads; others may cut it."""

    def __init__(
        self,
        client: Client | None,
        url: str,
        headers: Mapping[str, str],
        world: World | None,
    ) -> None:
        if isinstance(client, httpx.AsyncClient):
            raise SettingsError("an httpx.AsyncClient is for `async for`; give an httpx.Client")
        self.world = world or World()
        self._sleeps = world is not None
        self._address = _Address(url, headers)
        self._own = client is None
        self._follows = client is None or client.follow_redirects
        self._client = client or httpx.Client(limits=ALONE, verify=_trusted())
        self._woken = threading.Event()
        self._call = _Call()
        self._response: httpx.Response | None = None
        self._chunks: Iterator[bytes] = iter(())

    async def connect(self, step: Connect) -> Opening | Ending:
        call = self._call = _Call()
        if self._woken.is_set():
            return CLOSED
        request = self._address.request(self._client, step)
        request.extensions = {**request.extensions, "trace": call.trace}
        ask = functools.partial(self._asked, call, request)
        with _limited(call, step.within_s) as timer:
            try:
                answer = ask() if self._own else call.aside(ask)
            except FAULTS as error:
                return timer.ending or _ending_of(error)
        if answer is None:
            return timer.ending or CLOSED
        self._response, self._chunks = answer.response, answer.chunks
        return opening_of(answer.response, answer.said, self.world.wall_s())

    def _asked(self, call: _Call, request: httpx.Request) -> _Answer:
        response = self._sent(request)
        try:
            call.has(response.extensions.get("network_stream"))
            chunks = response.iter_bytes()
            return _Answer(response, chunks, b"" if _is_feed(response) else _said(chunks))
        except BaseException:
            response.close()
            raise

    def _sent(self, request: httpx.Request) -> httpx.Response:
        client, hops = self._client, 0
        while True:
            response = client.send(request, stream=True, follow_redirects=False, auth=_auth(hops))
            if response.next_request is None or not self._follows:
                return response
            response.close()
            request = self._address.redirected(response, hops, client.max_redirects)
            hops += 1

    async def read(self, within_s: float) -> bytes | Ending:
        with _limited(self._call, within_s) as timer:
            try:
                chunk = next(self._chunks, None)
            except FAULTS as error:
                return timer.ending or _ending_of(error)
        return chunk if chunk is not None else timer.ending or CLOSED

    async def pause(self, seconds: float) -> None:
        if self._sleeps:
            await self.world.sleep(seconds)
        else:
            self._woken.wait(seconds)

    async def hang_up(self) -> None:
        response, self._response, self._chunks = self._response, None, iter(())
        if response is not None:
            response.close()

    def cut(self) -> None:
        self._woken.set()
        self._call.cut()

    async def close(self) -> None:
        await self.hang_up()
        if self._own:
            self._client.close()

    async def state(self) -> httpx.Response:
        response = self._sent(self._address.state_request(self._client))
        try:
            response.read()
        finally:
            response.close()
        return response


def _said(chunks: Iterator[bytes]) -> bytes:
    body = b""
    for chunk in chunks:
        body += chunk
        if len(body) > SAID:
            break
    return body


class _Timer:
    ending: Ending | None = None


@contextlib.contextmanager
def _limited(call: _Call, within_s: float) -> Iterator[_Timer]:
    """Cut the call when the time is up. httpx limits one read, and not how many it takes."""
    timer = _Timer()

    async def cut() -> None:
        timer.ending = TIME_UP
        call.cut()

    alarm = SYNC.later(within_s, cut)
    try:
        yield timer
    finally:
        alarm.cancel()


# --- async --------------------------------------------------------------------------------------


class AsyncLine:
    """Waits in a scope that other tasks may cancel."""

    def __init__(
        self,
        client: Client | None,
        url: str,
        headers: Mapping[str, str],
        world: World | None,
    ) -> None:
        if isinstance(client, httpx.Client):
            raise SettingsError("an httpx.Client is for `for`; give an httpx.AsyncClient")
        self.world = world or AsyncWorld()
        self._sleeps = world is not None
        self._address = _Address(url, headers)
        self._own = client is None
        self._follows = client is None or client.follow_redirects
        self._client = client or httpx.AsyncClient(limits=ALONE, verify=_trusted())
        self._is_cut = False
        self._scope = anyio.CancelScope()
        self._response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None

    @contextlib.contextmanager
    def _limited(self, within_s: float) -> Iterator[None]:
        with anyio.move_on_after(within_s) as self._scope:
            if self._is_cut:
                self._scope.cancel()
            yield

    async def connect(self, step: Connect) -> Opening | Ending:
        request = self._address.request(self._client, step)
        ending = TIME_UP
        with self._limited(step.within_s):
            try:
                response = self._response = await self._sent(request)
                self._chunks = response.aiter_bytes()
                body = b"" if _is_feed(response) else await self._said(self._chunks)
            except FAULTS as error:
                ending = _ending_of(error)
            else:
                return opening_of(response, body, self.world.wall_s())
        return ending

    async def _sent(self, request: httpx.Request) -> httpx.Response:
        client, hops = self._client, 0
        while True:
            response = await client.send(
                request, stream=True, follow_redirects=False, auth=_auth(hops)
            )
            if response.next_request is None or not self._follows:
                return response
            with anyio.CancelScope(shield=True):
                await response.aclose()
            request = self._address.redirected(response, hops, client.max_redirects)
            hops += 1

    async def _said(self, chunks: AsyncIterator[bytes]) -> bytes:
        body = b""
        async for chunk in chunks:
            body += chunk
            if len(body) > SAID:
                break
        return body

    async def read(self, within_s: float) -> bytes | Ending:
        ending = TIME_UP
        with self._limited(within_s):
            try:
                chunk = None if self._chunks is None else await anext(self._chunks, None)
            except FAULTS as error:
                ending = _ending_of(error)
            else:
                return CLOSED if chunk is None else chunk
        return ending

    async def pause(self, seconds: float) -> None:
        with self._limited(seconds):
            await (self.world.sleep(seconds) if self._sleeps else anyio.sleep_forever())

    async def hang_up(self) -> None:
        response, self._response, self._chunks = self._response, None, None
        if response is not None:
            with anyio.CancelScope(shield=True):
                await response.aclose()

    def cut(self) -> None:
        self._is_cut = True
        self._scope.cancel()

    async def close(self) -> None:
        await self.hang_up()
        if self._own:
            with anyio.CancelScope(shield=True):
                await self._client.aclose()

    async def state(self) -> httpx.Response:
        response = await self._sent(self._address.state_request(self._client))
        try:
            await response.aread()
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()
        return response
