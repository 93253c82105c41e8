"""How a client sits at a table: messages, clicks and time in; messages, news and answers out.

`Guest.next` says what to do: open a connection, send, hand something over, wait. Whoever does it
tells how it went: `opened`, `received`, `closed`. Nothing here waits, sends or guesses, so the
TypeScript client (room_rules.ts) is the same; `clients/vectors/room` holds both to it.

Its promise: what is confirmed is what the server has, at that version; each event is handed over
once, after the state it belongs to; each request is answered once, and done at most once. What the
table is said to be is in `room_replica`, what is wanted of it in `room_requests`, and how one gets
in, and in again, in `room_connection`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from semel.client.feed_rules import parsed
from semel.client.room_connection import Connection
from semel.client.room_reading import (
    Message,
    Payload,
    Update,
    guard_of,
    message_of,
    presence_of,
    seconds,
    text,
    whole,
)
from semel.client.room_replica import Replica
from semel.client.room_requests import Optimistic, Requests
from semel.client.room_values import (
    Became,
    Deliver,
    Event,
    News,
    Over,
    Result,
    RoomError,
    Settle,
    State,
    Status,
    Step,
    Terms,
    Trouble,
    TurnedAway,
    Wait,
)

# Results that were handed over, and may come again.
REMEMBERED: Final = 64

CLOSED: Final = "closed before an answer came: the outcome is unknown"
ANOTHER: Final = "joined as somebody else before an answer came: the outcome is unknown"

# What a server says of a message that it could not read, so that it may not know whose it was.
UNREAD: Final = frozenset({"INVALID", "TOO_LARGE"})


class Guest:
    """Sits at one table, over one connection after the other.

    `chance` gives a number from 0 to 1, `letters` six random ones, `wall_s` the time since 1970.
    `renews` says that the next token may be another. `seq` is the number of the last request that
    was made under this `client_id`; None if nobody knows, and requests have no numbers.
    """

    def __init__(
        self,
        table_id: str,
        terms: Terms,
        chance: Callable[[], float],
        *,
        letters: Callable[[], str],
        wall_s: Callable[[], float],
        client_id: str,
        seq: int | None = 0,
        spectate: bool = False,
        renews: bool = False,
        optimistic: Optimistic | None = None,
    ) -> None:
        self.table_id = table_id
        self.client_id = client_id
        self.state: Any = None
        self._letters = letters
        self._wall_s = wall_s
        self._steps: deque[Step] = deque()
        self._results: list[str] = []
        self._user: tuple[str | None] | None = None  # as whom we were in last
        emit = self._steps.append
        self._connection = Connection(
            table_id,
            terms,
            chance,
            spectate=spectate,
            renews=renews,
            emit=emit,
            cursor=lambda: self.cursor,
            new_id=self._new_id,
            is_awaited=lambda: self._requests.is_awaited,
            lost=self._lost,
            ended=lambda error: self._requests.end(error or RoomError(CLOSED, code="CLOSED")),
        )
        self._requests = Requests(
            table_id,
            client_id,
            terms,
            chance,
            seq=seq,
            optimistic=optimistic,
            emit=emit,
            changed=self._show,
            stale=lambda now_s: self._replica.want(now_s, "stale"),
            why_unsent=self._connection.why_not_in,
        )
        self._replica = Replica(
            table_id,
            terms,
            chance,
            emit=emit,
            new_id=self._new_id,
            moved=self._moved,
            forked=self._forked,
        )

    # --- how things stand ---------------------------------------------------------------------

    @property
    def status(self) -> Status:
        return self._connection.status

    @property
    def turned_away(self) -> TurnedAway | None:
        return self._connection.turned_away

    @property
    def over(self) -> Over | None:
        return self._connection.over

    @property
    def confirmed(self) -> Any:
        return self._replica.state

    @property
    def version(self) -> int | None:
        return self._replica.version

    @property
    def cursor(self) -> str | None:
        position = self._replica.position
        return None if position is None else str(position)

    @property
    def viewer(self) -> str | None:
        return self._replica.viewer

    @property
    def pending(self) -> int:
        return self._requests.pending

    @property
    def is_settled(self) -> bool:
        """Is there a state, nothing on its way, and all to be seen that was answered?"""
        return self._requests.is_settled(self.version)

    # --- what to do next ----------------------------------------------------------------------

    def next(self, now_s: float) -> Step:
        if self.over is None:
            self._tick(now_s)
        if self._steps:
            return self._steps.popleft()
        over = self.over
        if over is not None:
            return over
        due_s = min(self._connection.due_s(), self._requests.due_s(), self._replica.due_s())
        return Wait(max(0.0, due_s - now_s))

    def _tick(self, now_s: float) -> None:
        self._requests.tick(now_s)
        self._replica.tick(now_s)
        self._connection.tick(now_s)

    # --- what the user wants ------------------------------------------------------------------

    def act(
        self,
        now_s: float,
        action: Mapping[str, Any],
        *,
        guard: str | bool = True,
        request_id: str | None = None,
    ) -> str:
        """Ask for this to be done; the id of the request, which may be one on its way."""
        # As it is now: who changes it later does not change what is sent again.
        said = json.loads(json.dumps(action, allow_nan=False))
        key = guard_of(said) if guard is True else guard or None
        twin = self._requests.twin(key, request_id)
        if twin is not None:
            return twin
        id = request_id or self._new_id()
        self._requests.add(now_s, id, said, key, is_new=not request_id)
        self._connection.hurry(now_s)
        return id

    def request_snapshot(self, now_s: float) -> None:
        if self.over is None:
            self._replica.want(now_s, "manual")

    def stop(self) -> None:
        if self.over is not None:
            return
        self._connection.end("closed", None)
        # What is still to be done is of no use to whoever leaves, but for answers.
        answers = [step for step in self._steps if isinstance(step, Settle)]
        self._steps.clear()
        self._steps.extend([*answers, Deliver(Became("closed"))])

    def fail(self, error: RoomError) -> None:
        """What is wrong will be wrong again."""
        self._connection.end("failed", error)

    # --- the connection -----------------------------------------------------------------------

    def opened(self, now_s: float, token: str | None) -> None:
        self._connection.opened(now_s, token)

    def closed(self, now_s: float, code: int | None = None, reason: str = "") -> None:
        """The connection is over, or there is none: cut, ended, refused."""
        self._connection.closed(now_s, code, reason)

    def received(self, now_s: float, message: str | bytes) -> None:
        if not self._connection.is_heard:
            return
        self._connection.heard(now_s)
        said = message_of(message)
        if said is None:
            self._replica.want(now_s, "gap")  # whatever it was, it is lost
        elif said.payload.get("tableId", self.table_id) == self.table_id:
            self._take(now_s, said)

    def _lost(self) -> None:
        self._replica.lost()
        self._requests.lost()

    # --- messages -----------------------------------------------------------------------------

    def _take(self, now_s: float, message: Message) -> None:
        request_id, payload = message.request_id, message.payload
        match message.kind:
            case "JOINED":
                self._joined(now_s, payload)
            case "TABLE_STATE_UPDATE":
                self._replica.update(now_s, payload, request_id)
            case "TABLE_SNAPSHOT":
                asked = None if request_id == self._connection.join_id else request_id
                self._replica.snapshot(now_s, payload, asked)
            case "ACTION_RESULT":
                self._requests.result(now_s, request_id, payload, self.version or 0)
            case "HEARTBEAT":
                self._heartbeat(now_s, payload)
            case "HAND_RESULT":
                self._result(payload)
            case "PRESENCE":
                self._deliver(presence_of(payload))
            case "ERROR":
                self._error(now_s, request_id, payload)
            case "LEFT":
                self._connection.left(now_s, text(payload.get("reason")))

    def _joined(self, now_s: float, payload: Payload) -> None:
        if not self._connection.is_joining:
            return
        self._connection.joined(now_s, seconds(payload.get("heartbeatMs")))
        viewer = text(payload.get("viewer")) or None
        if self._user not in {None, (viewer,)}:
            # An id belongs to its user: what is sent again by another one is done again.
            self._replica.forget()
            self._requests.forget()
            self._requests.end(RoomError(ANOTHER, code="CLOSED"))
            self.state = None
        self._user = (viewer,)
        head, resumed = parsed(payload.get("head")), payload.get("resumed") is True
        self._replica.joined(now_s, resumed=resumed, head=head)
        most_bytes = whole(payload.get("messageBytes")) or None
        self._requests.joined(now_s, most_bytes, resumed=resumed, at=self.version or 0)

    def _heartbeat(self, now_s: float, payload: Payload) -> None:
        heads = payload.get("heads")
        head = parsed(heads.get(self.table_id)) if isinstance(heads, dict) else None
        self._connection.steady()
        self._replica.heard(now_s, head)
        if head is not None and str(head) == self.cursor:
            self._requests.forget_late(now_s, head.offset)

    def _result(self, payload: Payload) -> None:
        version = whole(payload.get("stateVersion"))
        at = text(payload.get("position"), str(version))
        if version is None or at in self._results:
            return
        self._results = [*self._results, at][-REMEMBERED:]
        self._deliver(Result(version, payload.get("result")))

    def _error(self, now_s: float, request_id: str | None, payload: Payload) -> None:
        code, message = text(payload.get("code"), "FAILED"), text(payload.get("message"))
        after_s = seconds(payload.get("retryAfterMs"))
        if request_id is None and code in UNREAD:
            request_id = self._meant(code)
        turned_away, retry = TurnedAway(code, message), payload.get("retry") is True
        if self._connection.is_joining and request_id == self._connection.join_id:
            self._connection.refused(now_s, turned_away, retry=retry, after_s=after_s)
        elif self._replica.refused(now_s, request_id, after_s):
            if code == "UNAUTHORIZED":
                self._connection.unauthorized(now_s, turned_away)
        elif not self._requests.refused(now_s, request_id, payload):
            self._deliver(Trouble(code, message))

    def _meant(self, code: str) -> str | None:
        """What the server could not read, and so cannot name: if it can be only one."""
        if self._connection.is_joining:
            return self._connection.join_id if code == "TOO_LARGE" else None
        return None if self._replica.is_asking else self._requests.unanswered()

    # --- what follows from it -----------------------------------------------------------------

    def _moved(self, update: Update | None) -> None:
        version = self.version or 0
        self._connection.steady()
        if update is None:
            self._requests.replaced(version)
        else:
            self._requests.updated(version, update.request_id)
        self._show()
        for data in () if update is None else update.events:
            self._deliver(Event(version, data))

    def _forked(self, follows_join: bool) -> None:
        if follows_join:
            self._requests.forget_before()
        else:
            self._requests.forget()

    def _show(self) -> None:
        version = self.version
        if version is None:
            return
        self.state = self._requests.shown(self.confirmed)
        self._deliver(State(self.state, self.confirmed, version, self.viewer, self.pending))

    def _deliver(self, news: News | None) -> None:
        if news is not None:
            self._steps.append(Deliver(news))

    def _new_id(self) -> str:
        return f"{self.client_id}-{int(self._wall_s() * 1000)}-{self._letters()}"
