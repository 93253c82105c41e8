"""What a request says besides its method and path, under the names that Starlette uses.

`Request` makes these objects when a function asks for them. Do not change them. The same code
reads an ASGI scope and a WSGI environ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from http.cookies import SimpleCookie
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import SplitResult, parse_qsl, quote

__all__ = ["URL", "Client", "Cookies", "Header", "Headers", "NotSentError", "QueryParams", "State"]

Header: TypeAlias = tuple[bytes, bytes]

DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}

# Characters of a path that need no escape (RFC 3986 section 3.3).
IN_PATH = "/:@!$&'()*+,;=~"


class NotSentError(KeyError):
    """The request has no such header, cookie or parameter.

    From `scope` or `authorise` it is a refusal, like the answer None: the client has not sent what
    the function needs.
    """

    def __str__(self) -> str:
        return f"the request has no {self.args[1]} {self.args[0]!r}"


class Headers(Mapping[str, str]):
    """The headers by name, in any case. `raw` has the pairs of bytes, with lower-case names.

    A name that was sent several times gives its first value; `getlist` gives all of them.
    """

    __slots__ = ("raw",)

    def __init__(self, raw: Sequence[Header]) -> None:
        self.raw = raw

    def first(self, name: str) -> str | None:
        wanted = _sent(name)
        for found, content in self.raw:
            if found == wanted:
                return content.decode("latin-1")
        return None

    def __getitem__(self, name: str) -> str:
        found = self.first(name)
        if found is None:
            raise NotSentError(name, "header")
        return found

    def getlist(self, name: str) -> list[str]:
        wanted = _sent(name)
        return [content.decode("latin-1") for found, content in self.raw if found == wanted]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name.decode("latin-1") for name, _ in self.raw))

    def __len__(self) -> int:
        return len({name for name, _ in self.raw})


def _sent(name: str) -> bytes:
    """Return a header's name as it is sent. One that cannot be sent matches no header."""
    return name.lower().encode("latin-1", "replace")


class Cookies(dict[str, str]):
    """The cookies by name. Of several with one name, the first: it has the longest path."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__()
        for pair in ";".join(lines).split(";"):
            name, is_one, content = pair.partition("=")
            if is_one:
                self.setdefault(name.strip(), _unquoted(content.strip())[0])

    def __missing__(self, name: str) -> str:
        raise NotSentError(name, "cookie")


# The inverse of what `http.cookies`, and so most Python frameworks, write.
_unquoted = SimpleCookie().value_decode


class QueryParams(Mapping[str, str]):
    """The query's parameters by name: the last of each, as in Starlette. `getlist` gives all."""

    __slots__ = ("_last", "_pairs")

    def __init__(self, query: bytes) -> None:
        self._pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        self._last = dict(self._pairs)

    def __getitem__(self, name: str) -> str:
        try:
            return self._last[name]
        except KeyError:
            raise NotSentError(name, "parameter") from None

    def getlist(self, name: str) -> list[str]:
        return [content for found, content in self._pairs if found == name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)


class Client(NamedTuple):
    """The peer of the connection: the client, or the last proxy."""

    host: str
    port: int


def client_of(raw: Mapping[str, Any]) -> Client | None:
    """Return the peer; None if the server does not know it, as on a Unix socket."""
    if "REMOTE_ADDR" in raw:
        host, port = raw["REMOTE_ADDR"], str(raw.get("REMOTE_PORT"))  # Werkzeug has an int
        return Client(host, int(port) if port.isdecimal() else 0) if host else None
    found = raw.get("client")
    return None if found is None else Client(*found)


class URL(SplitResult):
    """The request's URL, with the path decoded. `str(url)` is the URL with escapes."""

    __slots__ = ()

    def __str__(self) -> str:
        return self._replace(path=quote(self.path, IN_PATH, errors="replace")).geturl()


def url_of(raw: Mapping[str, Any], host: str | None, path: str, query: bytes) -> URL:
    scheme = raw.get("scheme") or raw.get("wsgi.url_scheme") or "http"
    netloc = host or _server(raw, scheme)
    return URL(scheme, netloc, path, query.decode("latin-1"), "")


def _server(raw: Mapping[str, Any], scheme: str) -> str:
    """Return where the server listens, as in a URL."""
    host, port = raw.get("server") or ("", None)
    if "SERVER_NAME" in raw:
        host, port = raw["SERVER_NAME"], str(raw["SERVER_PORT"])
        port = int(port) if port.isdecimal() else None
    if ":" in host:
        host = f"[{host}]"
    return host if port in (None, DEFAULT_PORTS.get(scheme)) else f"{host}:{port}"


class State:
    """What other middlewares have put into the ASGI scope's `state`, as attributes."""

    __slots__ = ("_found",)

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._found = found

    def __getattr__(self, name: str) -> Any:
        if name == "_found":  # of a copy that is being made
            raise AttributeError(name)
        try:
            return self._found[name]
        except KeyError:
            raise AttributeError(
                f"request.state has no {name!r}. An ASGI middleware sets it, and must be outside "
                "of the one that reads it: in Starlette and FastAPI, add it afterwards"
            ) from None
