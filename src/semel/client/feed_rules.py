"""How a client follows a feed: bytes and time in, events and what to do next out.

`Follower.next` says what to do: connect, read, hand an event over, stop. Whoever does it tells how
it went: `opened`, `received`, `closed`, `timed_out`. Nothing here waits, sends or guesses, so both
colours and the TypeScript client (rules.ts) are the same; `clients/vectors/feed` holds them to it.

Its promise: what is handed over is each entry once, in order, or a `Reset` where that cannot be.
The cursor moves with a whole event, and nothing else. Offsets are numbers that follow one another:
one that is not larger was seen; one that leaves a hole is not handed over, and asked for again.
That holds for entries that are hidden from this viewer, too: they have a number, and no data.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

from semel.client.feed_frames import Frame, Frames, TooLargeError
from semel.entries import Position
from semel.errors import SemelError
from semel.values import value

# Larger whole numbers are not what they seem in a browser.
LARGEST_OFFSET: Final = 2**53

# A server that asks to be asked at once does not mean a thousand times a second.
SHORTEST_S: Final = 0.1

# Who is told to come back in a year looks again after ten minutes.
LONGEST_ASKED_S: Final = 600.0

OK: Final = 200
NO_CONTENT: Final = 204
# Told so, by a proxy or a gateway: not now. 429 and 503 may say when.
PASSING: Final = frozenset({408, 425, 429})
SERVER_ERROR: Final = 500


class FeedError(SemelError):
    """The feed cannot be followed, and asking again is no use.

    `status` is the server's answer, None when what is wrong came later; `detail` is what it said.
    """

    def __init__(self, message: str, *, status: int | None = None, detail: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail


# --- what is handed over ------------------------------------------------------------------------


@value
class Update:
    """An entry of the feed: where it stands, and what it says."""

    position: Position
    data: Any

    @property
    def id(self) -> str:
        """The cursor behind it."""
        return str(self.position)


@value
class Reset:
    """What came before cannot be continued: this is the state, at this position. Go on from it."""

    position: Position
    state: Any
    reason: str

    @property
    def id(self) -> str:
        """The cursor behind it."""
        return str(self.position)


FeedEvent: TypeAlias = Update | Reset


# --- what to do ---------------------------------------------------------------------------------

Why: TypeAlias = Literal["begin", "ended", "silence", "gap", "behind", "told"]
"""Why somebody connects: for the first time; the last connection ended, or could not be made; it
fell silent; it left an entry out; it did not send what it said was there; the server said when."""


@value
class Connect:
    """Hang up, pause, ask, and give up if no answer comes `within_s`.

    The cursor says where to go on; `last_seq`, beside it, what had been seen before that.
    """

    after_s: float
    within_s: float
    cursor: str | None
    last_seq: int | None
    why: Why


@value
class Read:
    """Wait for bytes, at most so long."""

    within_s: float


@value
class Deliver:
    """Hand this over."""

    event: FeedEvent


@value
class Over:
    """Hang up. There is nothing more, or an error to be raised."""

    error: FeedError | None = None


Step: TypeAlias = Connect | Read | Deliver | Over


@value
class Opening:
    """How an answer begins; for one that is no feed, also what it says."""

    status: int
    media_type: str = ""
    retry_after_s: float | None = None
    detail: str = ""


@value
class Terms:
    """How patient a follower is. Durations are seconds.

    `silence_s`: a connection without a byte for so long is dead. `grace_s`: so long after the
    server has said that there is more than we have, it should have come. `backoff_s`: the pause
    before connecting again, until the server says its own; it doubles, up to `longest_s`.
    `limit`: bytes of one event.
    """

    silence_s: float = 45.0
    grace_s: float = 5.0
    backoff_s: float = 1.0
    longest_s: float = 30.0
    limit: int = 8 << 20


class Follower:
    """Follows one feed. `chance` gives a number from 0 to 1, new for every pause."""

    def __init__(
        self,
        terms: Terms,
        chance: Callable[[], float],
        *,
        after: Position | None = None,
        last_seq: int | None = None,
    ) -> None:
        self.position = after
        self._terms = terms
        self._chance = chance
        self._last_seq = last_seq
        self._base_s = _between(SHORTEST_S, terms.backoff_s, terms.longest_s)
        self._failures = 0
        self._rushed = False
        self._head: Position | None = None
        self._behind_since_s: float | None = None
        self._opened_at_s: float | None = None
        self._frames = Frames(terms.limit)
        self._over: Over | None = None
        self._connect: Connect | None = None
        self._connect_after(0.0, "begin")

    @property
    def cursor(self) -> str | None:
        return None if self.position is None else str(self.position)

    @property
    def is_over(self) -> bool:
        return self._over is not None

    # --- what to do next ----------------------------------------------------------------------

    def next(self, now_s: float) -> Step:
        try:
            while self._over is None and self._connect is None:
                frame = self._frames.next()
                self._heed(self._frames.retry_ms)
                if frame is None:
                    return self._reading(now_s)
                if (event := self._taken(frame, now_s)) is not None:
                    return Deliver(event)
        except TooLargeError:
            self._fail(f"an event is larger than {self._terms.limit} bytes: allow more (limit=)")
        step = self._over or self._connect
        assert step is not None
        return step

    def _heed(self, retry_ms: int | None) -> None:
        if retry_ms is not None:
            self._base_s = _between(SHORTEST_S, retry_ms / 1000, self._terms.longest_s)

    def _reading(self, now_s: float) -> Read:
        # What is on its way is not missing, however slowly it comes.
        if not (self._is_behind() and self._frames.is_between):
            self._behind_since_s = None
            return Read(self._terms.silence_s)
        # Counted from here: the time that the user took for the last event was not the server's.
        if self._behind_since_s is None:
            self._behind_since_s = now_s
        left_s = self._behind_since_s + self._terms.grace_s - now_s
        return Read(_between(0.0, left_s, self._terms.silence_s))

    def _is_behind(self) -> bool:
        if self._head is None or self.position is None:
            return False
        return self._head.offset > self.position.offset

    # --- how it went --------------------------------------------------------------------------

    def opened(self, now_s: float, answer: Opening) -> None:
        if self._over is not None:
            return
        status = answer.status
        if status == OK and answer.media_type == "text/event-stream":
            self._connect = None
            self._opened_at_s = now_s
        elif status == NO_CONTENT:
            self._over = Over()
        elif status in PASSING or status >= SERVER_ERROR:
            self._turned_away(now_s, answer)
        elif status == OK:
            self._fail(f"the answer is {answer.media_type or 'nothing known'}, not a feed", answer)
        else:
            self._fail(f"the server answered {status}", answer)

    def received(self, chunk: bytes) -> None:
        self._frames.feed(chunk)

    def closed(self, now_s: float) -> None:
        """The connection is over, or there is none: cut, ended, refused."""
        self._again(now_s, "ended")

    def timed_out(self, now_s: float) -> None:
        """What was asked for did not come in the time that was given."""
        self._again(now_s, "silence" if self._behind_since_s is None else "behind")

    def stop(self) -> None:
        self._over = Over()

    # --- frames -------------------------------------------------------------------------------

    def _taken(self, frame: Frame, now_s: float) -> FeedEvent | None:
        position = parsed(frame.id)
        match frame.event if frame.data is not None else "head":
            case "message":
                return self._message(frame, position, now_s)
            case "reset":
                return self._reset(frame, position)
            case "end":
                self._end(frame, position, now_s)
            case _:
                self._heard(frame, position, now_s)
        return None

    def _message(self, frame: Frame, position: Position | None, now_s: float) -> Update | None:
        data = _json(frame.data)
        if position is None or data is MALFORMED:
            self._fail(f"an event that is none of a feed, with the id {frame.id!r}")
        elif self.position is None or position.offset == self.position.offset + 1:
            self._move(position)
            return Update(position, data)
        elif position.offset > self.position.offset:
            self._again(now_s, "gap")
        return None

    def _reset(self, frame: Frame, position: Position | None) -> Reset | None:
        said = _mapping(frame.data)
        position = position or parsed(said.get("position"))
        if position is None or "state" not in said:
            self._fail(f"a reset that is none, with the id {frame.id!r}")
            return None
        self._move(position)
        self._head = None
        self._last_seq = None  # what was seen before is over
        return Reset(position, said["state"], str(said.get("reason", "")))

    def _end(self, frame: Frame, position: Position | None, now_s: float) -> None:
        position = position or parsed(_mapping(frame.data).get("position"))
        if self.position is None:
            self.position = position
        elif position is not None and position.offset > self.position.offset:
            self._again(now_s, "gap")
            return
        self._over = Over()

    def _heard(self, frame: Frame, position: Position | None, now_s: float) -> None:
        """Nothing for the user. With an id, it stands for an entry that is not for this viewer."""
        head = parsed(_mapping(frame.data).get("head"))
        if frame.event in {"hello", "head"} and head is not None:
            self._head = head
        if position is None:
            return
        if self.position is None:
            self.position = position
        elif frame.event == "hello":
            pass  # it says from where it goes on; who has a position waits for what follows it
        elif position.offset == self.position.offset + 1:
            self._move(position)
        elif position.offset > self.position.offset:
            self._again(now_s, "gap")

    def _move(self, position: Position) -> None:
        self.position = position
        self._failures = 0
        self._rushed = False
        self._behind_since_s = None

    # --- connecting again ---------------------------------------------------------------------

    def _again(self, now_s: float, why: Why) -> None:
        lived_s = 0.0 if self._opened_at_s is None else now_s - self._opened_at_s
        if lived_s >= self._terms.longest_s:
            self._failures = 0  # servers close what has been open for long: that is no failure
        if why in {"gap", "behind"} and not self._rushed:
            self._rushed = True
            self._connect_after(0.0, why)
        else:
            self._connect_after(self._pause_s(), why)

    def _turned_away(self, now_s: float, answer: Opening) -> None:
        if not answer.retry_after_s:
            self._again(now_s, "ended")
            return
        # Nobody comes sooner than told, and not all together.
        asked_s = min(answer.retry_after_s, LONGEST_ASKED_S)
        self._connect_after(asked_s + self._chance() * self._base_s, "told")

    def _pause_s(self) -> float:
        """Anything from half the server's own pause up to it, doubled with every failure."""
        ceiling_s = min(self._base_s * 2.0 ** min(self._failures, 30), self._terms.longest_s)
        self._failures += 1
        least_s = self._base_s / 2
        return least_s + self._chance() * (ceiling_s - least_s)

    def _connect_after(self, after_s: float, why: Why) -> None:
        if self._over is not None:
            return
        self._frames = Frames(self._terms.limit)
        self._opened_at_s = None
        self._behind_since_s = None
        self._connect = Connect(after_s, self._terms.silence_s, self.cursor, self._last_seq, why)

    def _fail(self, message: str, answer: Opening | None = None) -> None:
        status, detail = (None, "") if answer is None else (answer.status, answer.detail)
        said = f"{message}: {detail}" if detail else message
        self._over = self._over or Over(FeedError(said, status=status, detail=detail))


# --- reading ------------------------------------------------------------------------------------

MALFORMED: Final = object()


def parsed(text: object) -> Position | None:
    """The position that was printed so; None for anything else."""
    found = Position.parse(text) if isinstance(text, str) else None
    return None if found is None or found.offset > LARGEST_OFFSET else found


def _json(text: str | None) -> Any:
    try:
        return json.loads(text or "", parse_constant=_refused)
    except (ValueError, RecursionError):
        return MALFORMED


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _mapping(text: str | None) -> dict[str, Any]:
    found = _json(text)
    return found if isinstance(found, dict) else {}


def _between(least: float, number: float, most: float) -> float:
    return min(max(least, number), most)
