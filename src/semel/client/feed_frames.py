"""`text/event-stream` as frames: bytes in, cut anywhere, frames out.

Read as https://html.spec.whatwg.org/multipage/server-sent-events.html says: lines end in LF, CR or
CRLF, one byte order mark is skipped, and an event counts when its blank line has come. What was cut
before that never was: it is not handed out, and its id is not.

Frames are taken one at a time, so that whoever stops between two of them stands between two of
them. The TypeScript client has the same in frames.ts; `clients/vectors` holds both to it.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Final

from semel.values import value

_BREAK: Final = re.compile(rb"\r\n|\r|\n")
_DIGITS: Final = re.compile(r"[0-9]+")
_BOM: Final = b"\xef\xbb\xbf"

# Of a number of milliseconds: so many are for ever, and more would only take time to read.
MOST_DIGITS: Final = 15


class TooLargeError(Exception):
    """An event is larger than somebody was ready to hold."""


@value
class Frame:
    """An event as it came. `id` is None when it brought none of its own.

    Without `data` it is no event for anybody; its id counts all the same.
    """

    event: str
    data: str | None
    id: str | None


class Frames:
    """The frames of one connection. Holds at most `limit` bytes of an event that is not over."""

    def __init__(self, limit: int) -> None:
        self.retry_ms: int | None = None
        self._limit = limit
        self._lines: deque[bytes] = deque()
        self._tail: list[bytes] = []
        self._tail_size = 0
        self._after_cr = False
        self._is_first = True
        self._begin()

    def _begin(self) -> None:
        self._event = ""
        self._id: str | None = None
        self._data: list[str] = []
        self._size = 0

    @property
    def is_between(self) -> bool:
        """Has nothing come of a next event?"""
        held = self._lines or self._tail_size or self._data or self._event
        return not held and self._id is None

    def feed(self, chunk: bytes) -> None:
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        if not chunk:
            return
        self._after_cr = chunk.endswith(b"\r")
        head, *rest = _BREAK.split(chunk)
        self._tail.append(head)
        self._tail_size += len(head)
        for piece in rest:
            self._lines.append(b"".join(self._tail))
            self._tail = [piece]
            self._tail_size = len(piece)

    def next(self) -> Frame | None:
        """The next frame, None when more has to come; `TooLargeError` when it may not."""
        while self._lines:
            line = self._lines.popleft()
            self._check(len(line))
            if self._is_first:
                self._is_first = False
                line = line.removeprefix(_BOM)
            if line:
                self._take(line)
            elif (frame := self._dispatched()) is not None:
                return frame
        self._check(self._tail_size)
        return None

    def _check(self, more: int) -> None:
        if self._size + more > self._limit:
            raise TooLargeError

    def _take(self, line: bytes) -> None:
        # No byte of a longer character is a line's end, so lines may be decoded one by one.
        name, _, text = line.decode("utf-8", "replace").partition(":")
        text = text.removeprefix(" ")
        match name:
            case "event":
                self._event = text
            case "data":
                self._data.append(text)
                self._size += len(line)
            case "id" if "\0" not in text:
                self._id = text
            case "retry" if _DIGITS.fullmatch(text):
                self.retry_ms = int(text.lstrip("0")[:MOST_DIGITS] or "0")
            case _:
                pass  # a comment, whose name is empty, or what somebody may mean some day

    def _dispatched(self) -> Frame | None:
        data = "\n".join(self._data) if self._data else None
        frame = Frame(self._event or "message", data, self._id)
        self._begin()
        return None if frame.data is None and frame.id is None else frame
