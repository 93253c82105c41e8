"""What a client knows of a table: a state at a position, and what to do where that does not go on.

An update is made to the state if it begins where the state is: at the same version of the same
history, which is what a position says and a number does not. What was seen is dropped. Anything
else is kept, and a snapshot asked for: one at a time, however much is missing, and again if none
comes, more and more slowly. Nothing here waits or sends; room_replica.ts is its twin.

The easy mistake is to compare what is no number: nothing is read of an update that is not whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from semel.client.room_patches import PatchError, patched
from semel.client.room_reading import Payload, Update, positioned, text, update_of
from semel.client.room_values import Backoff, Emit, Reason, Send, Terms
from semel.entries import Position
from semel.values import value

# Why a server sends the state of a history that is not the one we have.
ANOTHER: Final = frozenset({"forked", "ahead", "gone"})


@value
class Ask:
    """A snapshot is on its way: the one that follows a join, or the answer to this request.

    `at` is where the state was when it was asked for.
    """

    id: str | None
    at: Position | None
    until_s: float


class Replica:
    """`moved` is called when the state has changed: with the update, or None for a snapshot.

    `forked` is called before that if what was known of versions is over: all of it, or, if it is
    told that this follows a join, what was known before. `new_id` names requests.
    """

    def __init__(
        self,
        table_id: str,
        terms: Terms,
        chance: Callable[[], float],
        *,
        emit: Emit,
        new_id: Callable[[], str],
        moved: Callable[[Update | None], None],
        forked: Callable[[bool], None],
    ) -> None:
        self.position: Position | None = None
        self.state: Any = None
        self.viewer: str | None = None
        self._table_id = table_id
        self._terms = terms
        self._chance = chance
        self._emit = emit
        self._new_id = new_id
        self._on_moved = moved
        self._on_forked = forked
        self._backoff = Backoff(terms, chance)
        self._is_in = False
        self._buffer: list[Update] = []
        self._is_behind = False  # the last answer was older than what we have
        self._wanted: Reason | None = None
        self._ask: Ask | None = None
        self._asks = 0
        self._asked_at_s = -math.inf
        self._not_before_s = -math.inf
        self._head: Position | None = None
        self._apart_since_s: float | None = None

    @property
    def version(self) -> int | None:
        return None if self.position is None else self.position.offset

    # --- the connection -----------------------------------------------------------------------

    def joined(self, now_s: float, *, resumed: bool, head: Position | None) -> None:
        self._is_in = True
        if not resumed:
            self._ask = Ask(None, self.position, now_s + self._terms.resync_s)
        elif self.position is None:
            self.want(now_s, "reconnect")
        else:
            self.heard(now_s, head)
            self._pursue(now_s)

    def lost(self) -> None:
        """The connection is over: what follows comes from another."""
        self._is_in = False
        self._ask = None
        self._buffer = []
        self._settled()

    def forget(self) -> None:
        """What we have is the view of somebody else."""
        self.position = self.state = self.viewer = None

    # --- updates ------------------------------------------------------------------------------

    def update(self, now_s: float, payload: Payload, request_id: str | None) -> None:
        found, at = update_of(payload, request_id), self.position
        if found is None:
            self.want(now_s, "gap")
        elif at is None:
            self._keep(found)
        elif found.position.offset <= at.offset:
            if found.position.offset == at.offset and found.position.tag != at.tag:
                self.want(now_s, "gap")
        elif found.previous == at:
            self._follow(now_s, found)
        else:
            self._keep(found)
            self.want(now_s, "gap")

    def _keep(self, update: Update) -> None:
        # The newest: older ones are in the snapshot that will come.
        kept = [*self._buffer, update]
        self._buffer = kept[max(0, len(kept) - self._terms.buffered) :]

    def _follow(self, now_s: float, update: Update) -> None:
        if not self._apply(now_s, update):
            self._keep(update)
            self.want(now_s, "gap")
            return
        self._drain(now_s)
        if self._buffer:
            # Not without a pause, if one was asked for already: what is kept may fit nowhere.
            self.want(now_s, "gap")
            return
        self._asks = 0
        if self._wanted == "gap":
            self._wanted = None

    def _apply(self, now_s: float, update: Update) -> bool:
        try:
            state = patched(self.state, update.patch)
        except (PatchError, RecursionError):
            return False
        self._move(now_s, update.position, state)
        self._on_moved(update)
        return True

    def _drain(self, now_s: float) -> None:
        """Make what can be made of what was kept, and keep the rest."""
        kept, self._buffer = sorted(self._buffer, key=lambda u: u.position.offset), []
        for update in kept:
            assert self.position is not None
            is_next = update.previous == self.position
            if is_next and self._apply(now_s, update):
                continue
            if update.position.offset > self.position.offset:
                self._buffer.append(update)

    def _move(self, now_s: float, position: Position, state: Any) -> None:
        self.position, self.state = position, state
        self._is_behind = False
        if self._head is not None and _is_ahead(self._head, position):
            self._apart_since_s = now_s  # it gets nearer
        else:
            self._settled()

    # --- snapshots ----------------------------------------------------------------------------

    def snapshot(self, now_s: float, payload: Payload, request_id: str | None) -> None:
        ask = self._ask
        is_answer = ask is not None and request_id == ask.id
        position = positioned(payload, "stateVersion", "position")
        if position is None or "state" not in payload:
            self._ask = None if is_answer else ask
            self._not_helped(now_s)
        elif self._is_welcome(payload, position, ask if is_answer else None):
            self._take(now_s, payload, position, ask if is_answer else None)
        elif is_answer:
            self._ask = None
            if self._wanted is not None:
                self._not_helped(now_s)
        elif request_id is None:
            self._not_helped(now_s)

    def _is_welcome(self, payload: Payload, position: Position, ask: Ask | None) -> bool:
        """May the state be this, though it may have been newer before?"""
        if self.position is None or position.offset >= self.position.offset:
            return True
        if str(payload.get("reason")) in ANOTHER:
            return True
        if ask is None or ask.id is None:
            return ask is not None
        return ask.at == self.position and self._is_said_twice()

    def _is_said_twice(self) -> bool:
        """Whoever answers may have read it before what we were shown, but not twice.

        Then what we were shown was taken back. Taken at once, events would be told again.
        """
        was_behind, self._is_behind = self._is_behind, True
        return was_behind

    def _take(self, now_s: float, payload: Payload, position: Position, ask: Ask | None) -> None:
        is_first = ask is not None and ask.id is None
        if is_first or str(payload.get("reason")) in ANOTHER or _is_fork(position, self.position):
            self._on_forked(is_first)
        if ask is not None:
            self._ask = None
            if not is_first and self._wanted == "gap":
                self._pause(now_s)  # if there is another hole at once, it may be one that stays
        if self._ask is None:
            self._wanted = None
        self.viewer = text(payload.get("viewer")) or None
        self._move(now_s, position, payload["state"])
        self._on_moved(None)
        self._drain(now_s)
        if self._buffer:
            self._not_helped(now_s)

    def _not_helped(self, now_s: float) -> None:
        """Ask again, but not at once."""
        self._pause(now_s)
        self.want(now_s, self._wanted or "gap")

    def _pause(self, now_s: float) -> None:
        """Not longer than it lasts already: what nobody asked for puts off no question for ever."""
        if now_s >= self._not_before_s:
            self._not_before_s = now_s + self._backoff.pause_s()

    # --- asking -------------------------------------------------------------------------------

    @property
    def is_asking(self) -> bool:
        return self._ask is not None and self._ask.id is not None

    def want(self, now_s: float, reason: Reason) -> None:
        self._wanted = self._wanted or reason
        self._pursue(now_s)

    def refused(self, now_s: float, request_id: str | None, after_s: float | None) -> bool:
        """A request was answered with an error: was it ours?"""
        if request_id is None or self._ask is None or self._ask.id != request_id:
            return False
        self._ask = None
        pause_s = self._backoff.pause_s()
        self._not_before_s = now_s + (pause_s if after_s is None else after_s)
        return True

    def _pursue(self, now_s: float) -> None:
        if not (self._is_in and self._wanted and self._ask is None):
            return
        if now_s < self._not_before_s:
            return
        if now_s - self._asked_at_s > self._terms.longest_s:
            self._asks = 0
            self._backoff.reset()
        least_s = self._terms.resync_s
        ceiling_s = min(least_s * 2.0 ** min(self._asks, 30), self._terms.longest_s)
        within_s = least_s + self._chance() * max(0.0, ceiling_s - least_s)
        self._asks += 1
        self._asked_at_s = now_s
        self._ask = Ask(self._new_id(), self.position, now_s + within_s)
        payload = {"tableId": self._table_id, "currentVersion": self.version or 0}
        payload["reason"] = self._wanted
        self._emit(
            Send({"type": "REQUEST_SNAPSHOT", "requestId": self._ask.id, "payload": payload})
        )

    # --- what the server says is there --------------------------------------------------------

    def heard(self, now_s: float, head: Position | None) -> None:
        at = self.position
        if head is None or at is None:
            return
        if head == at:
            self._settled()
            return
        since_s = self._apart_since_s
        self._head = head
        if since_s is None:
            self._apart_since_s = now_s
        elif not _is_ahead(head, at) and now_s >= since_s + self._terms.grace_s:
            # Behind us, and that not only once: its numbers begin anew, or were taken back.
            self._settled()
            self.want(now_s, "gap")

    def _settled(self) -> None:
        self._head = None
        self._apart_since_s = None

    # --- time ---------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        if self._ask is not None and now_s >= self._ask.until_s:
            if self._ask.id is None:
                self._wanted = self._wanted or "reconnect"
            self._ask = None
        if now_s >= self._late_at_s():
            self._settled()
            self.want(now_s, "gap")
        self._pursue(now_s)

    def due_s(self) -> float:
        due_s = self._late_at_s()
        if self._ask is not None:
            return min(due_s, self._ask.until_s)
        return min(due_s, self._not_before_s) if self._is_in and self._wanted else due_s

    def _late_at_s(self) -> float:
        """When what the server said is there should have come."""
        if self._head is None or self.position is None or self._apart_since_s is None:
            return math.inf
        is_ahead = _is_ahead(self._head, self.position)
        return self._apart_since_s + self._terms.grace_s if is_ahead else math.inf


def _is_ahead(head: Position, at: Position) -> bool:
    """Is there more than we have, or another than ours in its place?"""
    return head.offset > at.offset or (head.offset == at.offset and head.tag != at.tag)


def _is_fork(position: Position, at: Position | None) -> bool:
    return at is not None and _is_ahead(at, position)
