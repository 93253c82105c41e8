"""What a request asks for: which job, from where, and whether as a stream. Pure.

Nothing that a client sends is an error of its own: a path that names no job is not found, and a
cursor that is none is told so in the stream, as every other that leads nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

from semel.entries import Position
from semel.feed import Reason, parsed
from semel.http.protocol import Request
from semel.values import value

__all__ = ["Asked", "Request", "asked", "job_of"]

# More than anybody of ours sends; the rest is not looked at.
MOST_PARAMETERS = 32

# A number of the bus has at most ten digits.
_SEQ = re.compile(r"[0-9]{1,10}")


@value
class Asked:
    """From where: a position, or the reason why there is none, or the number of an event.

    A browser that began with a number comes back with both: it goes on from the position, and has
    still seen what it had seen when it began.
    """

    is_stream: bool
    after: Position | None = None
    lost: Reason | None = None
    last_seq: int | None = None
    ticket: str = ""


def job_of(scope: Mapping[str, Any], base: str) -> str | None:
    """The job that the path names, below where the gateway is mounted; None if it names none.

    The path as it was sent decides: in `scope["path"]` an escaped slash looks like any other.
    """
    path: str = scope["path"]
    root: str = (scope.get("root_path") or "").rstrip("/")
    above = (root if path.startswith(root) else "") + base  # some servers leave the root out
    raw: bytes = scope.get("raw_path") or b""
    if raw:
        found, _, name = raw.partition(b"?")[0].rpartition(b"/")
        found, name = unquote_to_bytes(found), unquote_to_bytes(name)
    else:
        found, _, name = path.encode("utf-8", "surrogatepass").rpartition(b"/")
    if found != above.encode("utf-8", "surrogatepass") or not name:
        return None
    try:
        return name.decode()
    except UnicodeDecodeError:
        return None


def asked(request: Request) -> Asked:
    query = _parameters(request.query)
    wants_stream = any(
        name == b"accept" and b"text/event-stream" in content.lower()
        for name, content in request.headers.raw
    )
    ticket = query.get("ticket", "")
    cursor = (request.header("last-event-id") or "").strip(" \t") or query.get("after", "")
    seq = query.get("last_seq", "")
    last_seq = int(seq) if _SEQ.fullmatch(seq) else None
    if cursor:
        return Asked(wants_stream, *parsed(cursor), last_seq, ticket)
    if seq and last_seq is None:
        return Asked(wants_stream, lost="unreadable", ticket=ticket)
    return Asked(wants_stream, last_seq=last_seq, ticket=ticket)


def _parameters(query: bytes) -> dict[str, str]:
    """The first of each name."""
    found: dict[str, str] = {}
    few = b"&".join(query.split(b"&", MOST_PARAMETERS)[:MOST_PARAMETERS])
    for name, content in parse_qsl(few.decode("latin-1"), keep_blank_values=True):
        found.setdefault(name, content)
    return found
