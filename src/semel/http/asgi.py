"""The door for ASGI apps: Starlette, FastAPI, Litestar, Django under ASGI, or your own.

    app.add_middleware(IdempotencyMiddleware, store="redis://...", scope=tenant_of)

A request without a key, or of another method, is handed on with the very objects it came with.
With one, the body is read, the key is claimed, and the app runs with a `send` that gathers its
response: record, then send.

What is easy to get wrong: `more_body` does not mean that a response is a stream, since every
response looks so behind a `BaseHTTPMiddleware`; and a client that is gone is no reason to stop: an
app that were told so before its response is recorded would leave half of one, and be run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

from semel.attempt import CURRENT, Attempt, leave
from semel.colour import ASYNC, keep
from semel.http import protocol
from semel.http.body import Body, check_length
from semel.http.door import Door
from semel.http.exchange import Exchange, is_part_of
from semel.http.parts import NotSentError
from semel.http.protocol import KEY_HEADER, Refusal, Request, Response
from semel.http.request import (
    ATTEMPT,
    checked_tenant,
    fingerprint_of,
    is_stream,
    key_of,
)
from semel.http.rule import Route, Rule, Rules, Ruling, Scope
from semel.ports import Store

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIScope: TypeAlias = MutableMapping[str, Any]
ASGIApp: TypeAlias = Callable[[ASGIScope, Receive, Send], Awaitable[None]]

# Ways to send a body that we could not gather; without them an app sends bytes.
UNGATHERED = ("http.response.pathsend", "http.response.zerocopysend", "http.response.trailers")


class IdempotencyMiddleware:
    """Requests with an `Idempotency-Key` take effect once.

    `scope` says whose key it is and is asked on every request, before anything is looked up: a
    function of the request (sync or async) that gives the tenant, or the name of the only one. It
    may refuse by raising `Refusal`. `rule` is what a key means; `routes` has other rules for some
    paths.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        scope: Scope,
        store: Store | str | None = None,
        rule: Rule | None = None,
        routes: Mapping[str, Rule | None] | None = None,
    ) -> None:
        self.app = app
        self._rules = Rules(rule, scope, routes)
        self._door = Door(store, ASYNC)

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and ATTEMPT not in scope:  # a door behind a door does nothing
            ruling = self._rules.find(scope["method"], scope["path"])
            if ruling is not None:
                found = [content for name, content in scope["headers"] if name == KEY_HEADER]
                if found or ruling.required:
                    begun = await self._begun(ruling, found, scope, receive, send)
                    return None if begun is None else await begun.hold(self.app, scope)
        return await self.app(scope, receive, send)

    async def _begun(
        self, ruling: Ruling, found: list[bytes], scope: ASGIScope, receive: Receive, send: Send
    ) -> Conversation | None:
        """A conversation with this client; None when it has its answer already, or is gone."""
        request = request_of(scope, ruling.route)
        try:
            text = key_of(found)
            tenant = await tenant_of(ruling.scope, request)
            body = await gathered(request, receive, ruling.max_body)
            if body is None:
                return None
            try:
                fingerprint = await compared(ruling, request, body)
                exchange = self._door.exchange(ruling, request, text, tenant, fingerprint)
            except BaseException:
                body.close()
                raise
        except Refusal as refused:
            await reply(send, refused.response)
            return None
        return Conversation(exchange, ruling, Again(body, receive), send)


# --- the request --------------------------------------------------------------------------------


def request_of(scope: ASGIScope, route: Route | None = None) -> Request:
    path: str = scope["path"]
    root: str = scope.get("root_path") or ""
    raw = scope.get("raw_path")
    exact = ""
    if isinstance(raw, bytes):  # optional in ASGI
        exact = protocol.exact_path(raw, path, errors="replace", root=root)
    query = scope.get("query_string", b"")
    return Request(scope["method"], path, query, scope["headers"], scope, exact, None, route)


async def tenant_of(scope: Scope, request: Request) -> str:
    tenant: Any = scope
    if callable(scope):
        try:
            tenant = scope(request)
            if inspect.isawaitable(tenant):
                tenant = await tenant
        except NotSentError:
            tenant = None
    return checked_tenant(tenant)


async def gathered(request: Request, receive: Receive, most: int) -> Body | None:
    """The body; None when the client went away before it had sent it."""
    for name, content in request.headers.raw:
        if name == b"content-length":
            check_length(content.decode("latin-1"), most)  # before anybody is asked to send it
    body = Body(most)
    message = await receive()
    try:
        while message["type"] != "http.disconnect":
            piece = message.get("body", b"")
            if body.spooled:
                await asyncio.to_thread(body.add, piece)
            else:
                body.add(piece)
            if not message.get("more_body", False):
                return body
            message = await receive()
    except BaseException:
        body.close()
        raise
    body.close()
    return None


async def compared(ruling: Ruling, request: Request, body: Body) -> bytes:
    """The fingerprint; that of a body in a file takes its time, and others need the loop."""
    if body.spooled:
        return await asyncio.to_thread(fingerprint_of, ruling, request, body)
    return fingerprint_of(ruling, request, body)


class Again:
    """The app's `receive`: the body as it came, and after it whatever really comes.

    That is the news that the client is gone, at which frameworks cancel their handlers or stop in
    the middle of a response. So a conversation keeps it back until the response is recorded.
    """

    gone = False
    """Whether the app has received `http.disconnect`."""
    _most_s: float | None = None
    _listening: asyncio.Event | None = None

    def __init__(self, body: Body, receive: Receive) -> None:
        body.rewind()  # its fingerprint has read it
        self._body: Body | None = body
        self._receive = receive

    def keep_back(self, most_s: float) -> None:
        """The app is to come to its end, even if nobody listens any more."""
        self._most_s = most_s

    def let_through(self) -> None:
        self._most_s = None
        if self._listening is not None:
            self._listening.set()

    async def __call__(self) -> Message:
        body = self._body
        if body is None:
            if self._most_s is not None:
                await self._until_let_through(self._most_s)
            message = await self._receive()
            self.gone = self.gone or message["type"] == "http.disconnect"
            return message
        if not body.spooled:
            whole = body.whole()
            self.close()  # or it would stay as long as the app runs
            return {"type": "http.request", "body": whole, "more_body": False}
        piece = await asyncio.to_thread(body.next)
        if not piece:
            self.close()
        return {"type": "http.request", "body": piece, "more_body": bool(piece)}

    async def _until_let_through(self, most_s: float) -> None:
        self._listening = self._listening or asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._listening.wait()

    def close(self) -> None:
        if self._body is not None:
            self._body.close()
            self._body = None


async def reply(send: Send, response: Response) -> None:
    """Send a whole response, head and body."""
    await send(
        {
            "type": "http.response.start",
            "status": response.status,
            "headers": list(response.headers),
        }
    )
    await send({"type": "http.response.body", "body": response.body or b""})


# --- the conversation ---------------------------------------------------------------------------


def _is_end(message: Message) -> bool:
    """Return whether this message ends a response. Starlette leaves `more_body` out."""
    return message["type"] == "http.response.body" and not message.get("more_body", False)


class Conversation:
    """One keyed request and its response: the app's `receive` and `send`, and the record."""

    def __init__(self, exchange: Exchange, ruling: Ruling, again: Again, send: Send) -> None:
        self._exchange = exchange
        self._ruling = ruling
        self.receive = again
        again.keep_back(ruling.policy.max_run_s)  # for longer, nobody keeps the claim either
        self._send = send
        self._start: Message | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._scope: ASGIScope = {}
        self._passing = False  # what the app sends goes straight to the client
        self._silent = False  # the client has its answer from elsewhere
        self._broken: OSError | None = None  # what the server's `send` raised: the client is gone
        self._lingering: asyncio.TimerHandle | None = None
        self._lock: asyncio.Lock | None = None

    async def hold(self, app: ASGIApp, scope: ASGIScope) -> None:
        try:
            answer = await self._exchange.open()
            if answer is not None:
                await reply(self._send, answer)
                return
            token = self.begin(scope)
            try:
                await app(scope, self.receive, self.send)
            except BaseException as error:
                await self.over(error)
                raise
            finally:
                leave(token)
            await self.over(None)
        finally:
            self.tidy()

    def begin(self, scope: ASGIScope) -> contextvars.Token[Attempt | None]:
        """The claim is ours: from here on the app runs under it."""
        self._scope = scope
        scope[ATTEMPT] = self._exchange.attempt
        if scope.get("extensions"):
            offered = scope["extensions"].items()
            scope["extensions"] = {name: way for name, way in offered if name not in UNGATHERED}
        return CURRENT.set(self._exchange.attempt)

    async def over(self, error: BaseException | None) -> None:
        """The app has returned or raised: settle what its response has not."""
        if self._lock is None or not (error is None or isinstance(error, Exception)):
            await self._settle(error)
        else:  # it may be going live right now, and then it has its head
            async with self._lock:
                await self._settle(error)

    async def _settle(self, error: BaseException | None) -> None:
        if self._exchange.closed:
            return
        if self._exchange.live is not None and self._left_by_client(error):
            await self._exchange.colour.shield(self._exchange.end_live())
        elif error is None:
            await self._left_open()
        elif isinstance(error, Exception):
            await self._app_failed(error)
        else:
            self._exchange.closed = True  # it is not to go live meanwhile
            await self._exchange.interrupt(error)

    def tidy(self) -> None:
        self._exchange.let_go()
        if self._lingering is not None:
            self._lingering.cancel()
        self.receive.let_through()
        self.receive.close()

    def _left_by_client(self, error: BaseException | None) -> bool:
        """Return whether a live response ended early because its client is gone."""
        if isinstance(error, Exception):
            return self._broken is not None and is_part_of(self._broken, error)
        return self._broken is not None or self.receive.gone

    async def _app_failed(self, error: Exception) -> None:
        answer = await self._exchange.failed(error)
        self._passing = True
        if answer is not None and self._exchange.live is None:
            await reply(self._send, answer)

    async def _left_open(self) -> None:
        """The app returned without a whole response: what there is, the server may judge."""
        await self._exchange.failed(RuntimeError("the app returned without a whole response"))
        if self._start is not None and self._exchange.live is None:
            await self._pass_on()

    # What the app sees.

    async def send(self, message: Message) -> None:
        if self._lock is not None:
            async with self._lock:
                await self._take(message)
        elif self._passing or not _is_end(message):
            await self._take(message)
        else:  # the end of a usual response: while it is recorded, this is what waits
            self._keep_piece(message)
            await self._finish()

    async def _take(self, message: Message) -> None:
        if not self._passing:
            await self._gather(message)
        elif not self._silent:
            self._size += len(message.get("body") or b"")
            await self._send_live(message)

    def _is_last(self, message: Message) -> bool:
        """Return whether the client has the whole response when it has this message."""
        if message["type"] != "http.response.body":
            return False
        return _is_end(message) or self._exchange.is_complete(self._size)

    async def _send_live(self, message: Message) -> None:
        """Hand a message to the server; the end of a live response is recorded first."""
        if self._is_last(message) and self._exchange.live and not self._exchange.closed:
            await self._exchange.end_live(None if self._left_by_client(None) else self._size)
        try:
            await self._send(message)
        except OSError as error:
            self._broken = error
            raise

    async def _gather(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            if self._start is not None:
                raise RuntimeError("the app sent http.response.start a second time")
            # Whatever can be gone through once is enough for a server.
            headers = [(bytes(name), bytes(text)) for name, text in message.get("headers", ())]
            self._start = {**message, "headers": headers}
            if is_stream(headers):
                await self._go_live()
        elif kind == "http.response.body":
            await self._gather_piece(message)
        else:  # early hints and the like are not the response, and nobody may be there to see them
            with contextlib.suppress(OSError):
                await self._send(message)

    async def _gather_piece(self, message: Message) -> None:
        self._keep_piece(message)
        if _is_end(message):
            await self._finish()
        elif self._size > self._ruling.max_response:
            await self._go_live()
        elif self._lingering is None and not self._has_length():
            self._linger()

    def _keep_piece(self, message: Message) -> None:
        piece = bytes(message.get("body") or b"")  # a buffer may be used again for the next one
        if piece:
            self._pieces.append(piece)
            self._size += len(piece)

    def _has_length(self) -> bool:
        assert self._start is not None
        return any(name.lower() == b"content-length" for name, _ in self._start["headers"])

    # How a response leaves.

    async def _finish(self) -> None:
        """The whole response is here: record it, then send it."""
        pieces, self._pieces = self._pieces, []
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        response = self._closing(body if self._size <= self._ruling.max_response else None)
        try:
            answer = await self._exchange.close(
                response, routed="endpoint" in self._scope, size=self._size
            )
        finally:
            self.receive.let_through()
        if answer is response:
            await self._send_whole(body)
        else:
            await self._say(answer)

    async def _send_whole(self, body: bytes) -> None:
        assert self._start is not None
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _go_live(self) -> None:
        """Send the response while the app makes it: it is a stream, or too large to keep."""
        response = self._closing(None)
        try:
            answer = await self._exchange.go_live(response, routed="endpoint" in self._scope)
        finally:
            self.receive.let_through()
        if answer is response:
            await self._pass_on()
        else:
            await self._say(answer)

    def _closing(self, body: bytes | None) -> Response:
        """The response, which is over, whatever comes of it."""
        assert self._start is not None
        self._passing = True
        if self._lingering is not None:
            self._lingering.cancel()
        return Response(self._start["status"], tuple(self._start["headers"]), body)

    async def _pass_on(self) -> None:
        """What there is, and from now on whatever comes."""
        self._passing = True
        assert self._start is not None
        pieces, self._pieces = self._pieces, []
        await self._send_live(self._start)
        if pieces:
            body = b"".join(pieces)
            await self._send_live({"type": "http.response.body", "body": body, "more_body": True})

    async def _say(self, answer: Response) -> None:
        """Somebody else's answer is the one; what our app still sends is for nobody."""
        self._silent = True
        self._pieces = []
        await reply(self._send, answer)

    def _linger(self) -> None:
        """Of unknown length: if it has not ended soon, it is being read while it is made."""
        self._lock = asyncio.Lock()
        loop = asyncio.get_running_loop()
        self._lingering = loop.call_later(
            self._ruling.linger_s, lambda: keep(asyncio.ensure_future(self._lingered()))
        )

    async def _lingered(self) -> None:
        assert self._lock is not None
        async with self._lock:
            if not (self._exchange.closed or self._exchange.live):
                with contextlib.suppress(OSError):  # the app is told when it sends on
                    await self._go_live()
