"""Which other origins may read what is here, as browsers ask. https://fetch.spec.whatwg.org/#cors"""

from __future__ import annotations

import re
from collections.abc import Iterable

from semel.errors import SettingsError
from semel.http.parts import Header
from semel.http.protocol import Request, Response

__all__ = ["Cors"]

# So long a browser need not ask again.
MAX_AGE_S = 600

_HEADERS = b"Last-Event-ID, Authorization, Content-Type, Cache-Control, If-None-Match"


class Cors:
    """`origins` may read: a list of them, or "*" for all. `credentials`: with cookies, too."""

    def __init__(self, origins: Iterable[str] | str | None, *, credentials: bool = False) -> None:
        named = [origins] if isinstance(origins, str) else list(origins or ())
        self._all = "*" in named
        self._origins = frozenset(origin.rstrip("/").encode("latin-1") for origin in named)
        self._credentials = credentials
        for origin in named:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+/?", origin):
                raise SettingsError(
                    f"cors={origin!r} is no origin: write scheme and host, as in "
                    '"https://shop.example", or "*"'
                )
        if self._all and credentials:
            raise SettingsError(
                'cors="*" with credentials would let every page of the web read with its '
                "visitor's cookies: name the origins"
            )

    def headers(self, request: Request) -> tuple[Header, ...]:
        """What is added to every answer."""
        if not self._origins:
            return ()
        if self._all:
            return ((b"access-control-allow-origin", b"*"), _EXPOSED)
        origin = (request.header("origin") or "").encode("latin-1")
        vary = (b"vary", b"Origin")
        if origin not in self._origins:
            return (vary,)
        allowed = (b"access-control-allow-origin", origin)
        if not self._credentials:
            return (allowed, _EXPOSED, vary)
        return (allowed, (b"access-control-allow-credentials", b"true"), _EXPOSED, vary)

    def preflight(self, request: Request) -> Response:
        """What OPTIONS is answered, besides the headers of every answer."""
        said: list[Header] = [(b"allow", b"GET, HEAD, OPTIONS")]
        if self._origins and request.header("access-control-request-method"):
            said += [
                (b"access-control-allow-methods", b"GET, HEAD, OPTIONS"),
                (b"access-control-allow-headers", _HEADERS),
                (b"access-control-max-age", b"%d" % MAX_AGE_S),
            ]
        return Response(204, tuple(said), b"")


_EXPOSED: Header = (b"access-control-expose-headers", b"ETag, Retry-After")
