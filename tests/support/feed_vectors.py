"""Runs a follower through `clients/vectors/feed`; the README there says what the words mean.

clients/typescript/test/vectors.mjs is the same for the other client.
"""

from __future__ import annotations

import json
from pathlib import Path

from semel.client.feed_rules import (
    Connect,
    Deliver,
    Follower,
    Opening,
    Over,
    Read,
    Terms,
    Update,
    parsed,
)

FOLDER = Path(__file__).parents[2] / "clients" / "vectors" / "feed"


def cases(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def bytes_of(step):
    return bytes.fromhex(step["hex"]) if "hex" in step else step["bytes"].encode()


def cursor_of(place):
    """A cursor is written out, or its offset."""
    return f"{place}.{place:012d}" if isinstance(place, int) else place


def frame(event, data, place):
    return f"event: {event}\ndata: {json.dumps(data)}\nid: {cursor_of(place)}\n\n".encode()


def hello(at, head, retry=None):
    first = b"" if retry is None else f"retry: {retry}\n".encode()
    return first + frame("hello", {"head": cursor_of(head)}, at)


def shown(event):
    """An event as the vectors write it."""
    if isinstance(event, Update):
        offset = event.position.offset
        if event == Update(parsed(cursor_of(offset)), {"n": offset}):
            return {"update": offset}
        return {"update": {"id": event.id, "data": event.data}}
    return {"reset": {"id": event.id, "state": event.state, "reason": event.reason}}


class Walk:
    """A follower, a clock that stands still unless told, and what has been seen."""

    def __init__(self, options, chance):
        options = dict(options)
        self.now_s = 1000.0
        self.chance = chance
        self.slow_s = options.pop("slow_ms", 0) / 1000
        after = parsed(options.pop("after", None))
        last_seq = options.pop("last_seq", None)
        self.follower = Follower(Terms(**options), lambda: chance, after=after, last_seq=last_seq)
        self.seen = []
        self.step = None
        self.since_s = self.now_s
        self.advance()

    def advance(self):
        """Do all that can be done without the world."""
        while True:
            step = self.follower.next(self.now_s)
            if isinstance(step, Deliver):
                self.seen.append(step.event)
                self.now_s += self.slow_s
                continue
            if isinstance(step, Read):
                self.since_s = self.now_s
            elif step is not self.step:
                self.seen.append(step)
            self.step = step
            return

    def take(self, step):
        ((name, told),) = step.items()
        if name == "pass_ms" and not self.is_up(told):
            return  # somebody is still waiting
        getattr(self, f"on_{name}")(told)
        if name not in {"expect", "cursor"}:
            self.advance()

    def is_up(self, ms):
        assert isinstance(self.step, Read)
        self.now_s += ms / 1000
        return self.now_s - self.since_s > self.step.within_s - 1e-6

    def on_open(self, told):
        told = dict(told) if isinstance(told, dict) else {"status": told}
        told["media_type"] = told.pop("type", "text/event-stream")
        if isinstance(self.step, Connect):
            self.now_s += self.step.after_s
        self.follower.opened(self.now_s, Opening(**told))

    def on_hello(self, told):
        self.follower.received(hello(**told))

    def on_entries(self, offsets):
        for offset in offsets:
            self.follower.received(frame("message", {"n": offset}, offset))

    def on_end(self, offset):
        self.follower.received(frame("end", {"position": cursor_of(offset)}, offset))

    def on_bytes(self, text):
        self.follower.received(text.encode())

    def on_hex(self, text):
        self.follower.received(bytes.fromhex(text))

    def on_close(self, told):
        self.follower.closed(self.now_s)

    def on_pass_ms(self, told):
        self.follower.timed_out(self.now_s)

    def on_time_up(self, told):
        assert isinstance(self.step, Connect)
        assert self.step.within_s > 0
        self.follower.timed_out(self.now_s)

    def on_stop(self, told):
        self.follower.stop()

    def on_cursor(self, place):
        assert self.follower.cursor == cursor_of(place)

    def on_expect(self, wanted):
        seen, self.seen = self.seen, []
        assert [self.said(each) for each in seen] == [self.meant(each) for each in wanted]

    def meant(self, wanted):
        if "connect" in wanted:
            least, most = wanted["after_ms"]
            wanted = {"last_seq": None, **wanted, "connect": cursor_of(wanted["connect"])}
            wanted["after_ms"] = round(least + self.chance * (most - least))
        elif isinstance(wanted.get("over"), dict):
            wanted = {"over": {"detail": "", **wanted["over"]}}
        return wanted

    def said(self, seen):
        match seen:
            case Over(error=None):
                return {"over": None}
            case Over(error=error):
                assert str(error)
                return {"over": {"status": error.status, "detail": error.detail}}
            case Connect():
                return {
                    "connect": seen.cursor,
                    "after_ms": round(seen.after_s * 1000),
                    "last_seq": seen.last_seq,
                    "why": seen.why,
                }
        return shown(seen)


class Server:
    """Serves the frames of a case, cut behind so many bytes."""

    def __init__(self, case):
        self.frames = [text.encode() for text in case["frames"]]
        self.ids = [_id_of(text) for text in self.frames]
        self.ends = case["end"]

    def answer(self, cursor):
        """The bytes behind this cursor."""
        if cursor is None:
            return b"".join(self.frames)
        at = self.ids.index(cursor)
        return b"".join([self.frames[0], *self.frames[max(at, 0) + 1 :]])


def _id_of(text):
    for line in text.replace(b"\r", b"\n").split(b"\n"):
        if line.startswith(b"id: "):
            return line[4:].decode()
    return None
