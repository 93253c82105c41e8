"""What goes over the wire, as bytes. Pure.

A frame is one event of `text/event-stream`: its name, its data, and then its id, so that a frame
that is cut never moves a cursor. Lines end in LF only: not every client reads CRLF or CR.
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from semel.entries import Entry, Position

__all__ = ["end", "entry", "error", "head", "hello", "hidden", "message", "reset", "written"]

_LINE_END = re.compile(rb"\r\n|\r|\n")


def written(said: Mapping[str, Any]) -> bytes:
    """As JSON, on one line."""
    return _JSON(said).encode()


_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _frame(name: bytes, data: bytes, id: Position | None) -> bytes:
    if b"\n" in data or b"\r" in data:
        data = b"\ndata: ".join(_LINE_END.split(data))
    if id is None:
        return b"event: %b\ndata: %b\n\n" % (name, data)
    return b"event: %b\ndata: %b\nid: %b\n\n" % (name, data, str(id).encode())


def entry(entry: Entry) -> bytes:
    """An entry as it is in the log."""
    return _frame(b"message", entry.data, entry.position)


def message(data: bytes, position: Position) -> bytes:
    """What a viewer is shown of an entry."""
    return _frame(b"message", data, position)


def hidden(position: Position) -> bytes:
    """Instead of an entry that is not for this viewer: its cursor moves, and it is shown nothing.

    One for each, and all alike, so that a replay is what was live.
    """
    return _frame(b"head", written({"head": str(position)}), position)


def head(position: Position) -> bytes:
    """A sign of life: whoever is not here has missed something."""
    return _frame(b"head", written({"head": str(position)}), None)


def hello(head: Position, cursor: Position | None, retry_ms: int) -> bytes:
    """The first frame. Who is cut off before the next one goes on from `cursor`.

    None where it is not known whether one can go on from the client's: it keeps its own, and hears
    of the hole the next time.
    """
    return b"retry: %d\n%b" % (retry_ms, _frame(b"hello", written({"head": str(head)}), cursor))


def reset(reason: str, position: Position, state: Mapping[str, Any]) -> bytes:
    said = {"reason": reason, "position": str(position), "state": state}
    return _frame(b"reset", written(said), position)


def error(retry_ms: int) -> bytes:
    """Return the last frame of a stream whose next event cannot be shown.

    It has no id, so that the client reconnects with the cursor of the last event that it got.
    """
    return b"retry: %d\n%b" % (retry_ms, _frame(b"error", written({"reason": "failed"}), None))


def end(position: Position) -> bytes:
    return _frame(b"end", written({"position": str(position)}), position)
