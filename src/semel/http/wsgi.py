"""The door for WSGI apps: Flask, Django, or your own.

    app.wsgi_app = WSGIMiddleware(app.wsgi_app, store="postgresql://...", scope=tenant_of)

A request without a key, or of another method, is handed on with the very objects it came with.
With one, the body is read, the key is claimed, and the app runs with a `start_response` that
gathers its response: record, then send. The app's iterable is closed when the server closes ours,
as it would be without us.

What is easy to get wrong: a body that grows too large to keep must still arrive whole, so what
was gathered goes out first and the same iterator goes on; and what an app hands to `write()` is
part of its response.
"""

from __future__ import annotations

import functools
import inspect
import io
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from types import TracebackType
from typing import Any, TypeAlias
from wsgiref.types import StartResponse, WSGIApplication

from semel.attempt import CURRENT, Attempt, leave
from semel.colour import SYNC, run
from semel.errors import SettingsError
from semel.http import protocol
from semel.http.body import PIECE, Body, check_length
from semel.http.door import Door
from semel.http.exchange import Exchange, is_part_of
from semel.http.parts import Header, NotSentError
from semel.http.protocol import Refusal, Request, Response
from semel.http.request import (
    ATTEMPT,
    checked_tenant,
    fingerprint_of,
    is_stream,
    key_of,
)
from semel.http.rule import Route, Rule, Rules, Ruling, Scope
from semel.ports import Store

log = logging.getLogger("semel")

Environ: TypeAlias = dict[str, Any]
Headers: TypeAlias = list[tuple[str, str]]
ExcInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
)

KEY = "HTTP_IDEMPOTENCY_KEY"
INPUT = "wsgi.input"

# The two headers of a request that an environ names without HTTP_.
UNPREFIXED = ("CONTENT_TYPE", "CONTENT_LENGTH")


class WSGIMiddleware:
    """Requests with an `Idempotency-Key` take effect once.

    `scope` says whose key it is and is asked on every request, before anything is looked up: a
    function of the request that gives the tenant, or the name of the only one. It may refuse by
    raising `Refusal`. `rule` is what a key means; `routes` has other rules for some paths.

    Whether a handler was found is not to be seen from here, so a 404 or a 405 is recorded only
    where `Rule(stores=...)` lists it.
    """

    def __init__(
        self,
        app: WSGIApplication,
        *,
        scope: Scope,
        store: Store | str | None = None,
        rule: Rule | None = None,
        routes: Mapping[str, Rule | None] | None = None,
    ) -> None:
        self.app = app
        self._rules = Rules(rule, scope, routes)
        self._door = Door(store, SYNC)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if ATTEMPT in environ:  # a door behind a door does nothing
            return self.app(environ, start_response)
        ruling = self._rules.find(environ["REQUEST_METHOD"], path_of(environ))
        if ruling is None or (KEY not in environ and not ruling.required):
            return self.app(environ, start_response)
        body = Body(ruling.max_body)
        try:
            exchange = self._exchange(ruling, environ, body)
        except Refusal as refused:
            body.close()
            return reply(start_response, refused.response)
        except BaseException:
            body.close()
            raise
        return Conversation(exchange, ruling, body, environ, start_response).hold(self.app)

    def _exchange(self, ruling: Ruling, environ: Environ, body: Body) -> Exchange:
        request = request_of(environ, ruling.route)
        text = key_of([environ[KEY].encode("latin-1")] if KEY in environ else [])
        tenant = tenant_of(ruling.scope, request)
        gather(body, environ, ruling.max_body)
        fingerprint = fingerprint_of(ruling, request, body)
        return self._door.exchange(ruling, request, text, tenant, fingerprint)


# --- the request --------------------------------------------------------------------------------


def path_of(environ: Environ) -> str:
    """The path as the client sees it, wherever the app is mounted."""
    path: str = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    if path.isascii():
        return path or "/"
    return path.encode("latin-1").decode("utf-8", "backslashreplace")


_AUTHORITY = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?]*")


def exact_path_of(environ: Environ, path: str) -> str:
    """As `protocol.exact_path`; empty where the server does not say how the path was sent."""
    target: str = environ.get("RAW_URI") or environ.get("REQUEST_URI") or ""
    raw = _AUTHORITY.sub("", target, count=1) if not target.startswith("/") else target
    sent = raw.encode("latin-1", "replace")
    return protocol.exact_path(sent, path, errors="backslashreplace") or protocol.exact_path(
        sent,
        path,
        errors="replace",  # Werkzeug's server decodes with this handler
    )


def request_of(environ: Environ, route: Route | None = None) -> Request:
    headers = [
        (header, content.encode("latin-1"))
        for name, content in environ.items()
        if (header := header_named(name)) and (content or name not in UNPREFIXED)
    ]
    query = environ.get("QUERY_STRING", "").encode("latin-1")
    path = path_of(environ)
    exact = exact_path_of(environ, path)
    method = environ["REQUEST_METHOD"]
    return Request(method, path, query, headers, environ, exact, None, route)


@functools.lru_cache(maxsize=1024)  # clients choose the names, and mostly the same
def header_named(name: str) -> bytes | None:
    """The header behind a name in an environ, if it is one's."""
    if name.startswith("HTTP_") or name in UNPREFIXED:
        return name.removeprefix("HTTP_").replace("_", "-").lower().encode("latin-1")
    return None


def tenant_of(scope: Scope, request: Request) -> str:
    try:
        tenant: Any = scope(request) if callable(scope) else scope
    except NotSentError:
        tenant = None
    if inspect.iscoroutine(tenant):
        tenant.close()
        raise SettingsError("scope= is async, but a WSGI app is not; give it a plain function")
    return checked_tenant(tenant)


def gather(body: Body, environ: Environ, most: int) -> None:
    """Read the body to its end."""
    left = length_of(environ, most)
    read = environ[INPUT].read
    while left != 0:
        piece = read(PIECE if left is None else min(PIECE, left))
        if not piece:
            break
        body.add(piece)
        left = None if left is None else left - len(piece)
    if left:
        raise _malformed("The body ended before its Content-Length.")


def length_of(environ: Environ, most: int) -> int | None:
    """How much there is to read; None when the server ends the input where the body ends."""
    chunked = environ.get("HTTP_TRANSFER_ENCODING")
    content = environ.get("CONTENT_LENGTH")
    if content and not chunked:
        check_length(content, most)
        if content.isascii() and content.isdigit():
            return int(content.lstrip("0") or "0")
        raise _malformed("Content-Length is no number.")
    if environ.get("wsgi.input_terminated"):
        return None
    if chunked:  # who reads on would wait for ever, who does not would compare nothing
        raise _malformed("Where a chunked body ends cannot be seen here; send a Content-Length.")
    return 0


def _malformed(detail: str) -> Refusal:
    return Refusal(protocol.problem("body-malformed", detail))


# --- the response -------------------------------------------------------------------------------


def reply(
    start_response: StartResponse, response: Response, close: Callable[[], None] | None = None
) -> Iterable[bytes]:
    """Answer with a whole response; `close` is called when the server is done with it."""
    headers = [(name.decode("latin-1"), line.decode("latin-1")) for name, line in response.headers]
    start_response(status_line(response.status), headers)
    return Whole(response.body or b"", close)


def status_line(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Unknown"


class Whole:
    """A body that is all here: one piece, so that a server can say how long it is."""

    def __init__(self, body: bytes, close: Callable[[], None] | None = None) -> None:
        self._pieces = [body] if body else []
        self._close = close

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pieces)

    def close(self) -> None:
        if self._close is not None:
            self._close()


class Live:
    """A body that is sent while it is made: first what was gathered, then the rest."""

    def __init__(
        self,
        first: bytes,
        rest: Callable[[], bytes],
        attempt: Attempt | None,
        close: Callable[[], None],
    ) -> None:
        self._first = first
        self._rest = rest
        self._attempt = attempt
        self.close = close

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        first, self._first = self._first, b""
        if first:
            return first
        token = CURRENT.set(self._attempt)
        try:
            return self._rest()
        finally:
            leave(token)


# --- the conversation ---------------------------------------------------------------------------


class Conversation:
    """One keyed request and its response: the app's `start_response`, and the record."""

    def __init__(
        self,
        exchange: Exchange,
        ruling: Ruling,
        body: Body,
        environ: Environ,
        start_response: StartResponse,
    ) -> None:
        self._exchange = exchange
        self._ruling = ruling
        self._body = body
        self._environ = environ
        self._start_response = start_response
        self._iterable: Iterable[bytes] | None = None
        self._rest: Iterator[bytes] = iter(())
        self._status = ""
        self._headers: Headers = []
        self._raw_headers: tuple[Header, ...] = ()
        self._pieces: list[bytes] = []
        self._size = 0
        self._lingers_until = 0.0
        self._live: Callable[[bytes], object] | None = None  # the server's write(), once it is
        self._broken: Exception | None = None  # what that write() raised: the client is gone
        self._answer: Response | None = None  # the client is answered from elsewhere

    def hold(self, app: WSGIApplication) -> Iterable[bytes]:
        try:
            answer = run(self._exchange.open())
            if answer is not None:
                return reply(self._start_response, answer, self.close)
            token = CURRENT.set(self._exchange.attempt)
            try:
                self._run(app)
            finally:
                leave(token)
            return self._sent()
        except BaseException:
            self.close()
            raise
        finally:
            if self._live is None:  # nobody reads it any more, and the client may be slow
                self._exchange.let_go()
                self._body.close()

    def _run(self, app: WSGIApplication) -> None:
        self._environ[ATTEMPT] = self._exchange.attempt
        self._environ[INPUT] = self._body.as_file() or io.BytesIO(self._body.whole())
        try:
            self._gather(app)
        except Exception as error:
            if not self._answered_for(error):
                raise
        except BaseException as error:
            if not self._exchange.closed:
                self._exchange.closed = True
                run(self._exchange.interrupt(error))
            raise

    def _answered_for(self, error: Exception) -> bool:
        """The app raised: is there an answer all the same? Else the server sees the error."""
        if self._exchange.closed:
            return False
        if self._exchange.live is not None:
            self._live_failed(error)
            return False
        self._answer = run(self._exchange.failed(error))
        if self._answer is None:
            return False
        log.error("semel: the app raised, and what is recorded is sent", exc_info=error)
        return True

    def _gather(self, app: WSGIApplication) -> None:
        self._iterable = app(self._environ, self.start_response)
        self._rest = iter(self._iterable)
        while self._gathering:
            try:
                piece = next(self._rest)
            except StopIteration:
                return self._finish()
            self._take(piece)
        return None

    @property
    def _gathering(self) -> bool:
        """Whether all of the response so far is held back."""
        return not (self._exchange.closed or self._exchange.live)

    def _next_live(self) -> bytes:
        """Return the next piece of a live response; record its end, or an exception."""
        try:
            piece = next(self._rest)
            check_piece(piece)
        except StopIteration:
            self._end_live(None if self._broken else self._size)
            raise
        except BaseException as error:
            self._live_failed(error)
            raise
        self._size += len(piece)
        self._end_complete()
        return piece

    def _end_complete(self) -> None:
        """Record the end before the client has its last byte, where Content-Length shows it."""
        if self._exchange.is_complete(self._size):
            self._end_live(self._size)

    def _end_live(self, size: int | None = None) -> None:
        if self._exchange.live is None or self._exchange.closed:
            return
        try:
            run(self._exchange.end_live(size))
        except Exception as error:  # from `stores`, which is the user's
            self._live_failed(error)
            raise

    def _live_failed(self, error: BaseException) -> None:
        """Settle a live response whose app raised.

        An `Exception` is settled as `on_error` says, any other error as `on_crash` says. The error
        of the server's `write` is not the app's: the client has left.
        """
        if self._exchange.live is None or self._exchange.closed:
            return
        if self._broken is not None and is_part_of(self._broken, error):
            self._end_live()
        elif isinstance(error, Exception):
            run(self._exchange.failed(error))
        else:
            self._exchange.closed = True
            run(self._exchange.interrupt(error))

    def _sent(self) -> Iterable[bytes]:
        """What the server gets, now that it is recorded."""
        if self._answer is not None:
            return reply(self._start_response, self._answer, self.close)
        body = b"".join(self._pieces)
        self._pieces = []
        if self._live is not None:
            self._end_complete()
            return Live(body, self._next_live, self._exchange.attempt, self.close)
        self._start_response(self._status, self._headers)
        return Whole(body, self.close)

    def close(self) -> None:
        """Let go of the app's iterable, once, and of the body.

        A live response that the server closes early has been left by its client, unless the server
        itself is ending: gunicorn raises `SystemExit` in a worker that took too long.
        """
        iterable, self._iterable = self._iterable, None
        ending = sys.exception()
        try:
            if (close := getattr(iterable, "close", None)) is not None:
                close()
            if isinstance(ending, SystemExit | KeyboardInterrupt):
                self._live_failed(ending)
            self._end_live()
        except BaseException as error:
            self._live_failed(error)
            raise
        finally:
            self._body.close()

    # What the app sees.

    def start_response(
        self, status: str, headers: Headers, exc_info: ExcInfo | None = None, /
    ) -> Callable[[bytes], object]:
        if exc_info is not None:
            self._change_mind(exc_info)
        elif self._status:
            raise AssertionError("start_response was called a second time, without exc_info")
        self._status, self._headers = status, list(headers)
        self._raw_headers = tuple((n.encode("latin-1"), c.encode("latin-1")) for n, c in headers)
        if self._live is not None:
            self._live = self._start_response(status, headers, exc_info)
            if self._exchange.live is not None:
                self._exchange.live = self._response(None)
                self._exchange.live_routed = self._routed(self._exchange.live)
        elif self._gathering and is_stream(self._raw_headers):
            self._go_live()
        return self.write

    def _change_mind(self, exc_info: ExcInfo) -> None:
        """After the first byte the app is told that it is too late, as by any server."""
        if self._size and exc_info[1] is not None:
            raise exc_info[1].with_traceback(exc_info[2])

    def write(self, piece: bytes) -> None:
        self._take(piece)
        if self._live is not None:
            self._end_complete()
            pieces, self._pieces = self._pieces, []
            for gathered in pieces:
                self._write_live(self._live, gathered)

    def _write_live(self, write: Callable[[bytes], object], piece: bytes) -> None:
        try:
            write(piece)
        except Exception as error:  # waitress has an error of its own for this
            self._broken = error
            raise

    def _take(self, piece: bytes) -> None:
        if not self._status:
            raise AssertionError("the app answered without calling start_response")
        check_piece(piece)
        if not piece or self._answer is not None:
            return
        self._pieces.append(piece)
        self._size += len(piece)
        if self._gathering and self._goes_on():
            self._go_live()

    def _goes_on(self) -> bool:
        """More than is kept; or of unknown length, and read while it is made."""
        if self._size > self._ruling.max_response:
            return True
        now = self._exchange.colour.now()
        if not self._lingers_until:
            self._lingers_until = now + self._ruling.linger_s
            return False
        return now >= self._lingers_until and not self._has_length()

    def _has_length(self) -> bool:
        return any(name.lower() == b"content-length" for name, _ in self._raw_headers)

    # How a response leaves.

    def _finish(self) -> None:
        if not self._status:
            raise AssertionError("the app returned without calling start_response")
        response = self._response(b"".join(self._pieces))
        routed = self._routed(response)
        answer = run(self._exchange.close(response, routed=routed, size=self._size))
        self._use(response, answer)

    def _go_live(self) -> None:
        """Send the response while the app makes it: it is a stream, or too large to keep."""
        response = self._response(None)
        self._use(response, run(self._exchange.go_live(response, routed=self._routed(response))))
        if self._answer is None:
            self._live = self._start_response(self._status, self._headers)

    def _routed(self, response: Response) -> bool:
        return names(self._ruling.rule, response.status)

    def _use(self, response: Response, answer: Response) -> None:
        if answer is not response:
            # Somebody else's answer is the one; what our app still says is for nobody.
            self._answer = answer
            self._pieces = []

    def _response(self, body: bytes | None) -> Response:
        return Response(int(self._status[:3]), self._raw_headers, body)


def check_piece(piece: object) -> None:
    if not isinstance(piece, bytes):
        raise TypeError(f"a WSGI app answers with bytes, not {type(piece).__name__}")


def names(rule: Rule, status: int) -> bool:
    """Does `stores` list this very status?"""
    return rule.stores is not None and not callable(rule.stores) and status in rule.stores
