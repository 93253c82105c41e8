"""When a room's client connects, as whom it joins, and when it tries again. Pure.

It has one connection at a time: it waits, opens one, joins, and is in, until that ends, falls
silent or is shown out; then it waits again, longer with every failure. It ends when we leave, or
when the server has turned us away for good. Nothing here waits or sends; room_connection.ts is its
twin.

The easy mistake is a pause that outlasts those who wait for an answer: while somebody does, pauses
stay short. Those who only look on may take their time, and do not come all together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from semel.client.room_values import (
    Backoff,
    Became,
    Deliver,
    Emit,
    HangUp,
    Open,
    Over,
    RoomError,
    Send,
    Status,
    Terms,
    TurnedAway,
    Why,
)

# So many heartbeats long, somebody who is there says something.
PATIENCE: Final = 2.5

# So many connections, at least, are tried in the time that an action has.
TRIES: Final = 5

# What may be wrong if there is no connection; whoever is refused one is seldom told why.
ADVICE: Final = "look at the address, its path, and whether the server lets this page in (origins)"

SHOWN_OUT: Final = TurnedAway("UNAUTHORIZED", "may not be there any more")

GOING_AWAY: Final = 1001
TRY_LATER: Final = 1013

Phase: TypeAlias = Literal["waiting", "opening", "joining", "open"]


class Connection:
    """`cursor` says where we are, `new_id` names requests, `renews` that tokens may change.

    `is_awaited` says whether somebody waits for an answer. `lost` is called when a connection is
    over; `ended` when there will be no other, with the error, or None if we leave.
    """

    def __init__(
        self,
        table_id: str,
        terms: Terms,
        chance: Callable[[], float],
        *,
        spectate: bool,
        renews: bool,
        emit: Emit,
        cursor: Callable[[], str | None],
        new_id: Callable[[], str],
        is_awaited: Callable[[], bool],
        lost: Callable[[], None],
        ended: Callable[[RoomError | None], None],
    ) -> None:
        self.status: Status = "connecting"
        self.turned_away: TurnedAway | None = None
        self.over: Over | None = None
        self.join_id = ""
        self._table_id = table_id
        self._terms = terms
        self._chance = chance
        self._spectate = spectate
        self._renews = renews
        self._emit = emit
        self._cursor = cursor
        self._new_id = new_id
        self._is_awaited = is_awaited
        self._on_lost = lost
        self._on_ended = ended
        self._phase: Phase = "waiting"
        self._until_s = -math.inf
        self._is_told_when = False  # to come back: nobody comes sooner
        self._silence_s = PATIENCE * terms.heartbeat_s
        self._backoff = Backoff(terms, chance)
        self._rushed = False
        self._token: str | None = None
        self._token_refused: TurnedAway | None = None
        self._refusal: TurnedAway | None = None  # the last one since we were in
        self._reason = ""  # with which the last connection has ended, or the last try
        self._last_s = -math.inf  # when there was a connection, before this one

    @property
    def is_joining(self) -> bool:
        return self._phase == "joining"

    @property
    def is_heard(self) -> bool:
        """Is there a connection, of which what comes counts?"""
        return self.over is None and self._phase in {"joining", "open"}

    def why_not_in(self, since_s: float) -> str:
        """Why we were not let in since then; empty, if we were, or nobody knows."""
        was_there = self.is_heard or self._last_s > since_s
        if not was_there and self.turned_away is None:
            reason = f" ({self._reason})" if self._reason else ""
            return f"there was no connection{reason}: {ADVICE}"
        return f"the server does not let us in: {self._refusal}" if self._refusal else ""

    # --- its course ---------------------------------------------------------------------------

    def opened(self, now_s: float, token: str | None) -> None:
        if self.over is not None or self._phase != "opening":
            return
        if self._token_refused is not None and token == self._token:
            self._turned_away_for_good(self._token_refused)
            return
        self._phase = "joining"
        self._reason = ""
        self._until_s = now_s + self._terms.connect_s
        self._token = token
        self.join_id = self._new_id()
        told = {
            "tableId": self._table_id,
            "cursor": self._cursor(),
            "token": token,
            "spectate": self._spectate or None,
        }
        payload = {name: found for name, found in told.items() if found is not None}
        self._emit(Send({"type": "JOIN", "requestId": self.join_id, "payload": payload}))

    def joined(self, now_s: float, heartbeat_s: float | None) -> None:
        """We are in; `heartbeat_s`, if the server has said so."""
        self._silence_s = PATIENCE * (heartbeat_s or self._terms.heartbeat_s)
        self._phase = "open"
        self._until_s = now_s + self._silence_s
        self._token_refused = self._refusal = None
        self._become("open")

    def heard(self, now_s: float) -> None:
        """Somebody is there."""
        if self._phase == "open":
            self._until_s = now_s + self._silence_s

    def steady(self) -> None:
        """The connection is good for something: what went wrong before is forgotten."""
        self._backoff.reset()
        self._rushed = False

    def closed(self, now_s: float, code: int | None, reason: str) -> None:
        """The connection is over, or there is none: cut, ended, refused."""
        if self.over is not None or self._phase == "waiting":
            return
        self._reason = reason
        if code == GOING_AWAY and not self._rushed:
            self._rushed = True
            self._again(now_s, "drained", self._chance() * self._terms.backoff_s)
        elif code == TRY_LATER:
            pause_s = 2 * self._terms.backoff_s + self._pause_s()
            self._again(now_s, "overloaded", pause_s, is_told_when=True)
        else:
            self._again(now_s, "ended", self._pause_s())

    def left(self, now_s: float, reason: str) -> None:
        """Shown out. Whether we may come back is said when we do."""
        why = SHOWN_OUT if reason == "refused" else None
        self._again(now_s, "left", self._pause_s(), turned_away=why)

    def end(self, status: Status, error: RoomError | None, why: TurnedAway | None = None) -> None:
        if self.over is not None:
            return
        self._on_ended(error)
        self._become(status, why)
        self.over = Over(error)

    # --- turned away --------------------------------------------------------------------------

    def refused(self, now_s: float, why: TurnedAway, *, retry: bool, after_s: float | None) -> None:
        """The answer to our join."""
        if why.code == "UNAUTHORIZED":
            self.unauthorized(now_s, why)
        elif not retry:
            self._turned_away_for_good(why)
        elif after_s is None:
            self._again(now_s, "ended", self._pause_s(), turned_away=why)
        else:
            # Nobody comes sooner than told, and not all together.
            pause_s = after_s + self._chance() * self._terms.backoff_s
            self._again(now_s, "told", pause_s, is_told_when=True, turned_away=why)

    def unauthorized(self, now_s: float, why: TurnedAway) -> None:
        if not self._renews:
            self._turned_away_for_good(why)
            return
        self._token_refused = why
        rushed, self._rushed = self._rushed, True
        pause_s = self._pause_s() if rushed else 0.0
        self._again(now_s, "unauthorized", pause_s, turned_away=why)

    def _turned_away_for_good(self, why: TurnedAway) -> None:
        self.end("failed", RoomError(str(why), code=why.code), why)

    # --- trying again -------------------------------------------------------------------------

    def _again(
        self,
        now_s: float,
        why: Why,
        after_s: float,
        *,
        is_told_when: bool = False,
        turned_away: TurnedAway | None = None,
    ) -> None:
        self._last_s = now_s if self.is_heard else self._last_s
        self._refusal = turned_away or self._refusal
        self._phase = "waiting"
        self._until_s = now_s + after_s
        self._is_told_when = is_told_when
        self._on_lost()
        self._emit(HangUp(after_s, why))
        self._become("waiting", turned_away)

    def _pause_s(self) -> float:
        return self._backoff.pause_s(self._most_s())

    def _most_s(self) -> float:
        """Whoever waits for an answer has only so long; the others need not come together."""
        return self._terms.timeout_s / TRIES if self._is_awaited() else math.inf

    def hurry(self, now_s: float) -> None:
        """The pause may have been made when nobody waited for an answer; now somebody may."""
        if self._phase == "waiting" and self._is_awaited() and not self._is_told_when:
            self._until_s = min(self._until_s, now_s + self._backoff.same_s(self._most_s()))

    # --- time ---------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        if now_s < self._until_s:
            return
        if self._phase != "waiting":
            self._again(now_s, "silence", self._pause_s())
            return
        self._phase = "opening"
        self._until_s = now_s + self._terms.connect_s
        self._become("connecting", self.turned_away)
        self._emit(Open(self._terms.connect_s))

    def due_s(self) -> float:
        return self._until_s

    def _become(self, status: Status, turned_away: TurnedAway | None = None) -> None:
        self.turned_away = turned_away
        if self.status != status:
            self.status = status
            self._emit(Deliver(Became(status, turned_away)))
