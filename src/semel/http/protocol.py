"""What `Idempotency-Key` means on the wire: pure, for every door.

The header is that of draft-ietf-httpapi-idempotency-key-header-07: a string in double quotes. A
bare word is the same key, since most clients send one. What is no single string is refused before
anything is looked up.

A recorded response is kept as the message it was: status, header lines in their order, body to
the byte. The easy mistake is to replay what belongs to one connection or one person: `Set-Cookie`,
`Date` and hop-by-hop headers are never kept.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import unquote_to_bytes

from semel import keys
from semel.errors import (
    ClaimLostError,
    IdempotencyConflictError,
    InProgressError,
    OutcomeUnknownError,
    ReplayedError,
    ResultLostError,
    SemelError,
    SettingsError,
    StoreUnavailableError,
)
from semel.http.parts import (
    URL,
    Client,
    Cookies,
    Header,
    Headers,
    QueryParams,
    State,
    client_of,
    url_of,
)
from semel.values import Outcome, value

if TYPE_CHECKING:
    from semel.http.sse.tickets import Ticket

KEY_HEADER = b"idempotency-key"
REPLAYED = (b"idempotent-replayed", b"true")

# A browser shows a script only what is named here.
EXPOSED = (b"access-control-expose-headers", b"Idempotent-Replayed, Retry-After")


class Request:
    """The head of a request, as the application's functions receive it on ASGI and WSGI.

    `headers`, `cookies`, `query_params`, `path_params`, `url`, `client` and `state` are named as in
    Starlette. `raw` is the ASGI scope or the WSGI environ. `exact_path` is the path in which the
    escapes of `/`, of `%` and of bytes that are not UTF-8 remain. It is empty if the server does
    not show how the path was sent, or if that has no escapes. `ticket` is the gateway's, if a valid
    one came with the request. `route` finds the parameters in the path where no router has.
    """

    def __init__(
        self,
        method: str,
        path: str,
        query: bytes,
        headers: Sequence[Header],
        raw: Mapping[str, Any],
        exact_path: str = "",
        ticket: Ticket | None = None,
        route: Callable[[str], Mapping[str, str]] | None = None,
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = Headers(headers)
        self.raw = raw
        self.exact_path = exact_path
        self.ticket = ticket
        self._route = route

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.method} {self.path}>"

    def header(self, name: str) -> str | None:
        """Return the first header of this name, or None."""
        return self.headers.first(name)

    def cookie(self, name: str) -> str | None:
        """Return the cookie of this name, or None."""
        return self.cookies.get(name)

    @cached_property
    def cookies(self) -> Mapping[str, str]:
        return Cookies(self.headers.getlist("cookie"))

    @cached_property
    def query_params(self) -> QueryParams:
        return QueryParams(self.query)

    @cached_property
    def path_params(self) -> Mapping[str, Any]:
        """The parameters in the path: those of the middleware's own route, and a router's."""
        found: Mapping[str, Any] = self.raw.get("path_params") or {}
        return found if self._route is None else {**self._route(self.path), **found}

    @property
    def url(self) -> URL:
        return url_of(self.raw, self.header("host"), self.path, self.query)

    @property
    def client(self) -> Client | None:
        return client_of(self.raw)

    @property
    def state(self) -> State:
        return State(self.raw.get("state") or {})

    @property
    def compared_path(self) -> str:
        """The path that is compared with that of a retry, in the form of `exact_path`."""
        return self.exact_path or self.path.replace("%", "%25")

    @property
    def from_browser(self) -> bool:
        return any(name == b"origin" for name, _ in self.headers.raw)


@value
class Response:
    """A whole response. `body` None says that it was too large to be kept."""

    status: int
    headers: tuple[Header, ...]
    body: bytes | None

    def __semel_outcome__(self) -> Outcome:
        """How `admin.resolve` records it: as a door does."""
        if self.body is None:
            return Outcome("lost", b"its body was not given", self.status)
        if self.body and self.status in WITHOUT_BODY:
            raise SettingsError(f"a {self.status} has no body; give b'', or another status")
        try:
            return Outcome("value", written(self), self.status)
        except (TypeError, ValueError, AttributeError) as error:
            raise SettingsError(
                "a Response has a number, headers as pairs of bytes, and a body of bytes, such as "
                f"Response(201, ((b'content-type', b'text/plain'),), b'made'); this one: {error}"
            ) from error


# --- the key ------------------------------------------------------------------------------------


class Refusal(Exception):  # noqa: N818 - an answer, not a mishap
    """A request is answered here, and the handler is not called."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status)
        self.response = response


_STRING = re.compile(rb'"((?:[ !#-\[\]-~]|\\["\\])*)"')
_WORD = re.compile(rb"[!#-+\--:<-\[\]-~]+")
_ESCAPED = re.compile(rb'\\(["\\])')


def parse_key(contents: Sequence[bytes]) -> str:
    """The key that these header lines carry; `"k"` and `k` are the same."""
    if len(contents) != 1:
        raise Refusal(problem("key-malformed", "Idempotency-Key was sent more than once."))
    content = contents[0].strip(b" \t")
    if _WORD.fullmatch(content):
        key = content
    elif quoted := _STRING.fullmatch(content):
        key = quoted[1]
        if b"\\" in key:
            key = _ESCAPED.sub(rb"\1", key)
    else:
        raise Refusal(
            problem(
                "key-malformed",
                "Send one string of printable ASCII in double quotes, as in "
                'Idempotency-Key: "8e03978e-40d5-43dd-bc93-6894a57f9324"',
            )
        )
    if 0 < len(key) <= keys.LIMIT:
        return key.decode("ascii")
    raise Refusal(
        problem("key-malformed", f"Idempotency-Key must have 1 to {keys.LIMIT} characters.")
    )


# --- what is compared ---------------------------------------------------------------------------


# Escapes that are kept. A `%` that begins no escape is escaped: `%%32F` would become `%2F`.
_KEPT = re.compile(rb"%(2[Ff]|25|(?![0-9A-Fa-f]{2}))")
_NO_UTF8 = re.compile("[\udc80-\udcff]")


def exact_path(raw: bytes, path: str, *, errors: str, root: str = "") -> str:
    """Return the path with `%2F`, `%25` and bytes that are not UTF-8 still escaped.

    To clients and proxies `/a%2Fb` and `/a/b` are two paths; decoded, they are one. Spellings of
    the same path (`%2f` and `%2F`, `%61` and `a`) stay equal. `raw` is the path as it was sent;
    `errors` is the error handler with which the server decoded it into `path`. `root` is a mount
    point that `raw` may have before `path`. The result is empty where `raw` has no escapes, and
    where `raw` does not decode to `path`: a middleware may have changed `path`.
    """
    if b"%" not in raw:
        return ""
    raw = raw.partition(b"?")[0]
    decoded = unquote_to_bytes(raw).decode("utf-8", errors)
    kept = unquote_to_bytes(_KEPT.sub(lambda found: b"%25" + (found[1].upper() or b"25"), raw))
    text = kept.decode("utf-8", "surrogateescape")
    exact = _NO_UTF8.sub(lambda found: f"%{ord(found[0]) - 0xDC00:02X}", text)
    if decoded == path:
        return exact
    if decoded == root + path and exact.startswith(root):
        return exact.removeprefix(root)
    return ""


Fingerprint: TypeAlias = Literal["bytes", "json"] | Callable[[Request, bytes], Any] | None


class Digest:
    """What must be equal when the key comes again: method, path, query and body, or your choice."""

    def __init__(self, request: Request) -> None:
        path = request.compared_path
        self._hash = hashlib.sha256(
            b"%d %d %d %s %s %s"
            % (
                len(request.method),
                len(path),
                len(request.query),
                request.method.encode("utf-8", "surrogatepass"),
                path.encode("utf-8", "surrogatepass"),
                request.query,
            )
        )
        self.update = self._hash.update
        self.digest = self._hash.digest


def compared(fingerprint: Fingerprint, request: Request, body: bytes) -> bytes:
    """The fingerprint of a request whose body is at hand."""
    if fingerprint is None:
        return b""
    if callable(fingerprint):
        chosen = fingerprint(request, body)
        return keys.fingerprint(keys.canonical(chosen, where="fingerprint"))
    digest = Digest(request)
    digest.update(body if fingerprint == "bytes" else canonical_json(body))
    return digest.digest()


def canonical_json(body: bytes) -> bytes:
    """The same bytes for the same JSON, however it is spaced and ordered.

    Numbers are compared digit by digit, without passing through a float. A name that comes twice
    in one object means something else to everybody, so it is refused.
    """
    if not body:
        return b""
    try:
        found = json.loads(
            body, object_pairs_hook=_single, parse_float=Decimal, parse_constant=_no_number
        )
        return keys.canonical(found, where="body")
    except (ValueError, ArithmeticError, RecursionError) as error:
        said = problem("body-malformed", f"The body cannot be compared as JSON: {error}.")
        raise Refusal(said) from error


def _single(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is there twice")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# --- what is kept -------------------------------------------------------------------------------


# Of one connection, of one moment, or of one person.
NEVER_KEPT = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"set-cookie",
        b"set-cookie2",
        b"date",
        b"idempotent-replayed",  # of whoever the handler has asked
    }
)


NOTHING: frozenset[bytes] = frozenset()


def written(response: Response, never: frozenset[bytes] = NOTHING) -> bytes:
    """A response as it is recorded: a status line, the kept headers, an empty line, the body."""
    body = response.body
    assert body is not None
    lines = [b"%d" % response.status]
    dropped = never | _nominated(response.headers) | NEVER_KEPT
    for name, content in response.headers:
        lower = name.lower()
        if lower in dropped or (lower == b"content-length" and content != b"%d" % len(body)):
            continue
        lines.append(b"%b: %b" % (name, content))
    lines.append(b"")
    head = b"\r\n".join(lines)
    if head.count(b"\n") > len(lines) - 1 or head.count(b"\r") > len(lines) - 1:
        lines = [line for line in lines if b"\r" not in line and b"\n" not in line]
        head = b"\r\n".join(lines)
    return b"%b\r\n%b" % (head, body)


def _nominated(headers: Iterable[Header]) -> frozenset[bytes]:
    """What `Connection` names is of this connection only."""
    named = [content for name, content in headers if name.lower() == b"connection"]
    if not named:
        return NOTHING
    return frozenset(word.strip().lower() for content in named for word in content.split(b","))


def read(data: bytes) -> Response:
    """A recorded response; ValueError when it is none."""
    head, end, body = data.partition(b"\r\n\r\n")
    if not end:
        raise ValueError("it is no recorded response")
    status, *lines = head.split(b"\r\n")
    if not (status.isdigit() and b"100" <= status <= b"999" and len(status) == 3):  # noqa: PLR2004
        raise ValueError("it has no status")
    return Response(int(status), tuple(_header(line) for line in lines), body)


# Maximum number of digits in a length. int() raises ValueError for more than 4300.
DIGITS = 18

# RFC 9110 sections 15.3.5, 15.3.6 and 15.4.5: a server refuses to send a body with these.
WITHOUT_BODY = (204, 205, 304)


def length_of(response: Response, method: str) -> int:
    """Return the Content-Length; 0 where there is no valid one, or the response has no body."""
    if method.upper() == "HEAD" or response.status in WITHOUT_BODY:
        return 0
    for name, content in response.headers:
        if name.lower() == b"content-length" and content.isdigit() and len(content) <= DIGITS:
            return int(content)
    return 0


def as_json(status: int, found: Any) -> Response:
    """A response that says this; ValueError when JSON cannot."""
    if status in WITHOUT_BODY:
        return Response(status, (), b"")
    try:
        body = json.dumps(found, allow_nan=False).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    length = (b"content-length", b"%d" % len(body))
    return Response(status, ((b"content-type", b"application/json"), length), body)


def _header(line: bytes) -> Header:
    name, colon, content = line.partition(b": ")
    if not colon:
        raise ValueError("it has a line that is no header")
    return name, content


def replayed(response: Response, request: Request) -> Response:
    """The recorded response, marked as one."""
    extra = (REPLAYED, EXPOSED) if request.from_browser else (REPLAYED,)
    return Response(response.status, response.headers + extra, response.body)


# --- what is said instead -----------------------------------------------------------------------


PROBLEMS: Mapping[str, tuple[int, str]] = {
    "key-missing": (400, "Idempotency-Key is missing"),
    "key-malformed": (400, "Idempotency-Key is malformed"),
    "body-malformed": (400, "The body cannot be compared"),
    "tenant-malformed": (400, "The tenant of this request cannot be used"),
    "tenant-missing": (403, "This request belongs to no tenant"),
    "coding-not-accepted": (406, "The recorded response has a coding that is not accepted"),
    "in-progress": (409, "A request is outstanding for this Idempotency-Key"),
    "outcome-unknown": (409, "An earlier request with this Idempotency-Key was interrupted"),
    "response-not-kept": (410, "The response for this Idempotency-Key was not kept"),
    "body-too-large": (413, "The body is too large for a request with an Idempotency-Key"),
    "key-reused": (422, "Idempotency-Key is already used"),
    "interrupted": (500, "The request was interrupted"),
    "store-unavailable": (503, "Idempotency cannot be guaranteed right now"),
}

TYPE = "urn:semel:problem:"


def problem(
    name: str, detail: str, *, retry_after: float | None = None, **members: Any
) -> Response:
    """An error as `application/problem+json` (RFC 9457)."""
    return described(name, *PROBLEMS[name], detail, retry_after=retry_after, **members)


def described(
    name: str,
    status: int,
    title: str,
    detail: str,
    *,
    retry_after: float | None = None,
    **members: Any,
) -> Response:
    """A problem that need not be one of ours."""
    said = {"type": TYPE + name, "title": title, "status": status, "detail": detail, **members}
    body = json.dumps(said).encode()
    headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-language", b"en"),
        (b"content-length", b"%d" % len(body)),
    ]
    if retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, ceil(retry_after))))
    return Response(status, tuple(headers), body)


RETRY_STORE_S = 1.0


def unsettled() -> Response:
    """For a handler that has run, and whose transaction was rolled back or gave no answer."""
    return problem(
        "store-unavailable",
        "Whether this request took effect could not be recorded. Ask again with the same key: it "
        "takes effect once.",
        retry_after=RETRY_STORE_S,
    )


def refusal(error: SemelError, pace_s: float = 1.0) -> Response:
    """What a caller is told when its request was not run, or not to its end.

    `pace_s` is how long requests of this kind take: asking sooner is asking in vain.
    """
    match error:
        case InProgressError():
            wait_s = min(max(pace_s, 1.0), max(error.retry_after, 1.0))
            return problem(
                "in-progress",
                "The first request with this key is still being processed. Ask again with the "
                "same key.",
                retry_after=wait_s,
            )
        case ClaimLostError():
            return problem(
                "in-progress",
                "Another request with this key has taken over. Ask again with the same key.",
                retry_after=pace_s,
            )
        case IdempotencyConflictError():
            return problem(
                "key-reused",
                "This key was used for another request: another method, path, query or body. "
                "Nothing was done. Use a new key for a new request.",
            )
        case OutcomeUnknownError():
            return problem(
                "outcome-unknown",
                "An earlier request with this key vanished while it was being processed, and "
                "nobody knows yet whether it took effect. It is not repeated until that is "
                "settled.",
            )
        case ResultLostError():
            return problem(
                "response-not-kept",
                "The request with this key was processed once. Its response could not be kept, "
                "so it cannot be shown again.",
            )
        case StoreUnavailableError():
            return problem(
                "store-unavailable",
                "Whether this request was made before cannot be looked up right now, so nothing "
                "was done. Ask again with the same key.",
                retry_after=RETRY_STORE_S,
            )
        case ReplayedError():
            return problem("interrupted", f"{error}")
        case _:
            raise error
