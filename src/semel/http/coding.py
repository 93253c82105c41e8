"""Content codings of a recorded response: what a request accepts, and how to decode the rest.

A response that was compressed inside the middleware is recorded as it was sent. A retry may come
from another client, with another `Accept-Encoding`. Nothing here does I/O.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping

from semel.http.parts import Header
from semel.http.protocol import Request, Response

# RFC 9110 section 8.4.1.3: `x-gzip` is the same as `gzip`.
ALIASES = {b"x-gzip": b"gzip"}

# `wbits` of zlib for each coding that can be decoded here. Some servers send `deflate` without
# the zlib header.
WBITS: Mapping[bytes, tuple[int, ...]] = {b"gzip": (31,), b"deflate": (15, -15)}

# Headers that describe the coded bytes. They would be wrong after decoding.
OF_CODED_BYTES = frozenset(
    {b"content-encoding", b"content-md5", b"content-digest", b"repr-digest", b"digest"}
)

# Maximum number of gzip members in a body. Encoders usually write one. Each costs a copy of the
# rest.
MAX_MEMBERS = 64


class NotAcceptedError(Exception):
    """The request refuses a coding of the recorded response, which cannot be decoded for it.

    The data cannot be decoded here, or the request refuses `identity`, too.
    """

    def __init__(self, codings: list[bytes]) -> None:
        self.codings = b", ".join(codings).decode("latin-1")
        super().__init__(self.codings)


def accepted(response: Response, request: Request, max_bytes: int) -> Response:
    """Return the response as the request accepts it, or raise `NotAcceptedError`.

    If the request refuses one coding of the response, all of them are decoded, up to `max_bytes`.
    A part, with `Content-Range`, is not decoded.
    Without `Accept-Encoding`, every coding is accepted, unless `Vary` says that it was negotiated.
    """
    codings = _words(response.headers, b"content-encoding")
    codings = [coding for coding in codings if coding != b"identity"]
    if not codings or not response.body:
        return response
    weights = _weights(request)
    if weights is None:
        if b"accept-encoding" not in _words(response.headers, b"vary"):
            return response
        weights = {}
    if all(weights.get(coding, weights.get(b"*", False)) for coding in codings):
        return response
    partial = any(name.lower() == b"content-range" for name, _ in response.headers)
    if partial or not weights.get(b"identity", weights.get(b"*", True)):
        raise NotAcceptedError(codings)
    body = response.body
    try:
        for coding in reversed(codings):
            body = _decoded(body, coding, max_bytes)
    except (KeyError, ValueError, zlib.error) as error:
        raise NotAcceptedError(codings) from error
    return Response(response.status, tuple(_uncoded(response.headers, len(body))), body)


def _words(headers: Iterable[Header], wanted: bytes) -> list[bytes]:
    """Return the elements of a list header, in lower case, over all of its lines."""
    lines = b",".join(content for name, content in headers if name.lower() == wanted)
    words = [word.strip().lower() for word in lines.split(b",")]
    return [ALIASES.get(word, word) for word in words if word]


_WEIGHT = re.compile(rb"\s*q\s*=\s*(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*")


def _weights(request: Request) -> dict[bytes, bool] | None:
    """Return whether each coding in `Accept-Encoding` has a weight above 0; None without it.

    A malformed weight counts as 0: every client can read a body without a coding.
    """
    if not any(name == b"accept-encoding" for name, _ in request.headers.raw):
        return None
    weights: dict[bytes, bool] = {}
    for word in _words(request.headers.raw, b"accept-encoding"):
        coding, semicolon, given = word.partition(b";")
        weight = _WEIGHT.fullmatch(given)
        positive = not semicolon or (weight is not None and float(weight[1]) > 0)
        coding = ALIASES.get(coding.strip(), coding.strip())
        weights[coding] = weights.get(coding, True) and positive
    return weights


def _decoded(body: bytes, coding: bytes, max_bytes: int) -> bytes:
    *first, last = WBITS[coding]
    for wbits in first:
        try:
            return _inflated(body, wbits, max_bytes)
        except zlib.error:
            continue
    return _inflated(body, last, max_bytes)


def _inflated(data: bytes, wbits: int, max_bytes: int) -> bytes:
    """Return the decoded bytes; raise ValueError if they are too many or cut off."""
    out = bytearray()
    for _ in range(MAX_MEMBERS):
        inflater = zlib.decompressobj(wbits)
        out += inflater.decompress(data, max_bytes + 1 - len(out))
        if len(out) > max_bytes or not inflater.eof:
            raise ValueError(f"it has more than {max_bytes} bytes, or is cut off")
        data = inflater.unused_data
        if not data:
            return bytes(out)
    raise ValueError(f"it has more than {MAX_MEMBERS} members")


def _uncoded(headers: tuple[Header, ...], length: int) -> Iterable[Header]:
    """Yield the headers of the decoded body, with `Vary`.

    The ETag becomes weak, because the bytes differ.
    """
    for name, content in headers:
        lower = name.lower()
        if lower == b"content-length":
            yield name, b"%d" % length
        elif lower == b"etag" and not content.startswith(b"W/"):
            yield name, b"W/" + content
        elif lower not in OF_CODED_BYTES:
            yield name, content
    if not {b"*", b"accept-encoding"} & set(_words(headers, b"vary")):
        yield b"vary", b"Accept-Encoding"
