"""Messages as NATS has them, and back: CloudEvents' own binding.

Structured: the body is the whole CloudEvent, and the header `content-type` says so. Binary: each
attribute is a header `ce-<name>`, percent-encoded as CloudEvents wants it for HTTP, and the body is
the payload. Both are read, whatever is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias
from urllib.parse import quote, unquote

from semel.cloudevents import (
    STRUCTURED,
    NotAnEventError,
    from_binary,
    from_json,
    to_binary,
    to_json,
)
from semel.messages import Message

Mode: TypeAlias = Literal["structured", "binary"]

PREFIX = "ce-"
CONTENT_TYPE = "content-type"

# Printable ASCII, without what has a meaning: the space, the quote and the percent sign.
_AS_IT_IS = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


def encoded(text: str) -> str:
    """The text as a header can have it: a header has no line breaks, and loses outer spaces."""
    return quote(text, safe=_AS_IT_IS)


def write(message: Message, mode: Mode) -> tuple[dict[str, str], bytes]:
    """Headers and body. `UnicodeEncodeError` for what no encoding has."""
    if mode == "structured":
        return {CONTENT_TYPE: STRUCTURED}, to_json(message).encode()
    attributes, body = to_binary(message)
    return {f"{PREFIX}{name}": encoded(text) for name, text in attributes.items()}, body


def read(headers: Mapping[str, str], body: bytes) -> Message:
    attributes: dict[str, str] = {}
    for name, text in headers.items():
        known = name.lower()
        if known == CONTENT_TYPE and text.startswith("application/cloudevents"):
            return from_json(body)
        if known.startswith(PREFIX):
            attributes[known.removeprefix(PREFIX)] = _decoded(text)
    if not attributes:
        return from_json(body)  # a CloudEvent whose sender knew no headers
    return from_binary(attributes, body)


def _decoded(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise NotAnEventError(f"an attribute is no UTF-8: {error}") from error


def headers_of(raw: bytes) -> dict[str, str]:
    """The headers of a stored message, as they were sent: `NATS/1.0`, then one per line."""
    lines = raw.decode("utf-8", "replace").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if line)
    return {name: text.strip() for name, _, text in pairs}


def size(headers: Mapping[str, str], body: bytes) -> int:
    """How many bytes the server counts."""
    lines = sum(len(name) + len(text) + 4 for name, text in headers.items())
    return len("NATS/1.0\r\n\r\n") + lines + len(body)
