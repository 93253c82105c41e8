"""What a client wants done at a table, until it is: one request after the other, each once.

A request keeps its id and its number, however often it is sent: after a reconnect, and when the
server says that nothing was decided. It ends with an answer, or when its time is up. Until the
confirmed state shows what came of it, it is shown on top of that. Nothing here waits or sends;
room_requests.ts is its twin.

The easy mistake is to show an action on top of a state that has it. An update says whose request
has made it; of a snapshot nobody can tell what is in it. So what may have been sent before that is
not shown on top of it until it is answered, and neither is what is asked again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from semel.client.room_reading import Payload, seconds, spoken, text, whole
from semel.client.room_values import (
    ActionError,
    ActionResult,
    ActionTimeoutError,
    Backoff,
    Emit,
    RoomError,
    Send,
    Settle,
    Terms,
)

Optimistic: TypeAlias = Callable[[Any, Any], Any]
"""What a state becomes when an action is done, as far as this client can tell."""

# Whose numbers are remembered, for those who ask again.
REMEMBERED: Final = 256


class Request:
    """An action on its way."""

    def __init__(
        self,
        id: str,
        seq: int | None,
        action: Any,
        guard: str | None,
        *,
        asked_s: float,
        until_s: float,
    ) -> None:
        self.id = id
        self.seq = seq
        self.action = action
        self.guard = guard
        self.asked_s = asked_s
        self.until_s = until_s
        self.not_before_s = -math.inf
        self.is_sent = False
        self.was_sent = False  # or may have been, by whomever, under this id
        self.is_shown = True  # on top of a state that does not have it
        self.version = 0  # from which on the confirmed state shows it


class Requests:
    """`changed` is called when what is pending has changed; `stale` when a snapshot is needed.

    `why_unsent` says why nothing could be sent since then; empty, if nobody knows.
    `seq` is the number of the last request of this client; None if they have no numbers.
    """

    def __init__(
        self,
        table_id: str,
        client_id: str,
        terms: Terms,
        chance: Callable[[], float],
        *,
        seq: int | None,
        optimistic: Optimistic | None,
        emit: Emit,
        changed: Callable[[], None],
        stale: Callable[[float], None],
        why_unsent: Callable[[float], str],
    ) -> None:
        self._table_id = table_id
        self._client_id = client_id
        self._terms = terms
        self._seq = seq
        self._optimistic = optimistic
        self._emit = emit
        self._on_changed = changed
        self._on_stale = stale
        self._why_unsent = why_unsent
        self._backoff = Backoff(terms, chance)
        self._is_in = False
        self._is_current = True  # what is confirmed is of the history of this connection
        self._most_bytes: int | None = None
        self._queue: list[Request] = []
        self._done: list[Request] = []  # and not seen yet
        self._numbers: dict[str, int | None] = {}
        self._sent: set[str] = set()  # of those whose numbers are remembered
        self._brought: set[str] = set()  # of those, too: others made them, and may have sent them
        self._unanswered: dict[str, None] = {}  # the last ones of this connection
        self._reached = 0
        self._reached_at_s = -math.inf
        self._told = 0  # so far by this connection
        self._done_before: list[Request] = []

    @property
    def pending(self) -> int:
        return len(self._done) + len(self._queue)

    @property
    def is_awaited(self) -> bool:
        """Does somebody wait for an answer?"""
        return bool(self._queue)

    def is_settled(self, version: int | None) -> bool:
        """Is nothing on its way, and everything to be seen that was answered?"""
        return not self._queue and version is not None and version >= self._reached

    # --- asking -------------------------------------------------------------------------------

    def twin(self, guard: str | None, request_id: str | None) -> str | None:
        """The request on its way that is the same as this one.

        Whoever names one that was asked before means that one, whatever is on its way for the same.
        """
        is_again = request_id in self._numbers
        for request in self._queue:
            is_same = guard is not None and request.guard == guard
            if request.id == request_id or (is_same and not is_again):
                return request.id
        return None

    def add(
        self, now_s: float, id: str, action: Any, guard: str | None, *, is_new: bool = True
    ) -> None:
        """`is_new`: the id was made for it, and nobody has had it before."""
        until_s = now_s + self._terms.timeout_s
        is_brought = not is_new and id not in self._numbers
        if len(self._queue) >= self._terms.pending:
            said = f"{len(self._queue)} actions wait for their answer, and no more may"
            was_sent = is_brought or id in self._sent or id in self._brought
            error = ActionError("TOO_MANY", said, request_id=id, was_sent=was_sent)
            self._emit(Settle(id, error))
            return
        if is_brought:
            self._brought.add(id)
        elif id not in self._sent:
            self._numbers.pop(id, None)  # nobody has seen it, and later ones may have been taken
        seq = self._number(id)
        request = Request(id, seq, action, guard, asked_s=now_s, until_s=until_s)
        request.was_sent = id in self._sent or id in self._brought
        request.is_shown = not request.was_sent
        if self._is_too_large(request):
            return
        self._queue.append(request)
        self._on_changed()
        self._pursue(now_s)

    def _number(self, id: str) -> int | None:
        if id not in self._numbers:
            self._seq = None if self._seq is None else self._seq + 1
            self._numbers[id] = self._seq
        if len(self._numbers) > REMEMBERED + len(self._queue):
            self._forget_numbers({id, *(request.id for request in self._queue)})
        return self._numbers[id]

    def _forget_numbers(self, needed: set[str]) -> None:
        """The oldest, but none that is on its way."""
        for oldest in [each for each in self._numbers if each not in needed]:
            if len(self._numbers) <= REMEMBERED:
                return
            del self._numbers[oldest]
            self._sent.discard(oldest)
            self._brought.discard(oldest)

    def _is_too_large(self, request: Request) -> bool:
        """If it is, it is settled: the server would not even say to whom it says so."""
        most = self._most_bytes
        if most is None or (size := len(spoken(self._message(request)).encode())) <= most:
            return False
        said = f"the message has {size} bytes, and the server takes {most}"
        error = ActionError("TOO_LARGE", said, request_id=request.id, was_sent=request.was_sent)
        self._emit(Settle(request.id, error))
        return True

    def _pursue(self, now_s: float) -> None:
        if not self._is_in or not self._queue:
            return
        first = self._queue[0]
        if first.is_sent or now_s < first.not_before_s:
            return
        first.is_sent = first.was_sent = True
        self._sent.add(first.id)
        self._unanswered[first.id] = None
        if len(self._unanswered) > REMEMBERED:
            del self._unanswered[next(iter(self._unanswered))]
        self._emit(Send(self._message(first)))

    def _message(self, request: Request) -> Mapping[str, Any]:
        named = {"type": "ACTION_REQUEST", "requestId": request.id}
        seq = request.seq
        numbered = {} if seq is None else {"clientId": self._client_id, "clientSeq": seq}
        return {**named, **numbered, "payload": {**request.action, "tableId": self._table_id}}

    # --- the connection -----------------------------------------------------------------------

    def joined(self, now_s: float, most_bytes: int | None, *, resumed: bool, at: int) -> None:
        """`most_bytes` of a message, if the server has said so; `at` is the confirmed version."""
        before = self.pending
        self._is_in = True
        self._is_current = resumed
        if resumed:
            self._done = [each for each in self._done if each.version > at]
        self._told, self._done_before = 0, self._done
        self._most_bytes = most_bytes
        self._queue = [request for request in self._queue if not self._is_too_large(request)]
        if self.pending < before:
            self._on_changed()
        self._pursue(now_s)

    def lost(self) -> None:
        """What was sent may not have come, or its answer may not: it is sent again."""
        self._is_in = False
        self._unanswered.clear()
        for request in self._queue:
            request.is_sent = False

    # --- answers ------------------------------------------------------------------------------

    def result(self, now_s: float, request_id: str | None, payload: Payload, at: int) -> None:
        """The answer to a request; `at` is the version that is confirmed."""
        version = whole(payload.get("stateVersion")) or 0
        error = payload.get("error")
        request = self._answered(request_id)
        if request is None:
            if request_id in self._numbers:
                self._reach(now_s, version)  # too late to be told, but that far it is
            return
        if payload.get("success") is not True:
            self._failed(now_s, request, error if isinstance(error, dict) else {}, version)
            return
        self._reach(now_s, version)
        self._queue.remove(request)
        reply, action = payload.get("reply"), payload.get("action")
        cached = payload.get("cached") is True
        self._emit(Settle(request.id, ActionResult(request.id, reply, version, cached, action)))
        was_shown = request.is_shown
        request.is_shown = was_shown or self._is_current
        if version > at or not self._is_current:
            request.version = version
            self._done = [*self._done, request]
        if not was_shown or request not in self._done:
            self._on_changed()
        self._next(now_s)

    def refused(self, now_s: float, request_id: str | None, error: Payload) -> bool:
        """A request was answered with an error that is no result: was it ours?"""
        request = self._answered(request_id)
        if request is not None:
            self._failed(now_s, request, error, 0)
        return request is not None

    def _answered(self, request_id: str | None) -> Request | None:
        self._unanswered.pop(request_id or "", None)
        return next((each for each in self._queue if each.id == request_id), None)

    def unanswered(self) -> str | None:
        """The one request that the server may be talking of, if there is one and no other."""
        return next(iter(self._unanswered)) if len(self._unanswered) == 1 else None

    def _failed(self, now_s: float, request: Request, error: Payload, version: int) -> None:
        code, message = text(error.get("code"), "FAILED"), text(error.get("message"))
        if error.get("retry") is True:
            after_s = seconds(error.get("retryAfterMs"))
            pause_s = self._backoff.pause_s()
            request.is_sent = False
            request.not_before_s = now_s + (pause_s if after_s is None else after_s)
            return
        self._reach(now_s, version)
        self._queue.remove(request)
        self._emit(Settle(request.id, ActionError(code, message, request_id=request.id)))
        self._on_changed()
        if code == "STATE_STALE_VERSION":
            self._on_stale(now_s)
        self._next(now_s)

    def _next(self, now_s: float) -> None:
        self._backoff.reset()
        self._pursue(now_s)

    def _reach(self, now_s: float, version: int) -> None:
        self._told = max(self._told, version)
        if version > self._reached:
            self._reached, self._reached_at_s = version, now_s

    # --- what is shown ------------------------------------------------------------------------

    def updated(self, version: int, request_id: str | None) -> None:
        """The confirmed state is this far, by what was done for this request."""
        self._is_current = True
        self._done = [
            each for each in self._done if each.version > version and each.id != request_id
        ]
        for request in self._done:
            request.is_shown = True
        for request in self._queue:
            request.is_shown = request.is_shown and request.id != request_id

    def replaced(self, version: int) -> None:
        """The confirmed state is this far, and may have whatever was sent."""
        self.updated(version, None)
        for request in self._queue:
            request.is_shown = request.is_shown and not request.was_sent

    def forget(self) -> None:
        """What was done may have been taken back: the confirmed state is all that counts."""
        self._done = []
        self._reached = self._told = 0

    def forget_before(self) -> None:
        """The same for what was told by connections before; what this one has told is so."""
        self._done = [request for request in self._done if request not in self._done_before]
        self._reached = self._told

    def forget_late(self, now_s: float, version: int) -> None:
        """There is nothing behind this version: what should be there was taken back.

        Not at once: whoever says so may have looked before it was done.
        """
        is_late = now_s >= self._reached_at_s + self._terms.grace_s
        if self._reached > version and is_late:
            self.forget()
            self._on_changed()

    def shown(self, confirmed: Any) -> Any:
        """The confirmed state with what is pending."""
        if self._optimistic is None:
            return confirmed
        for request in [each for each in [*self._done, *self._queue] if each.is_shown]:
            try:
                # A copy: whoever changes what they are given changes nothing here.
                confirmed = self._optimistic(
                    copy.deepcopy(confirmed), copy.deepcopy(request.action)
                )
            except Exception:  # noqa: BLE001, S112 - it does not fit this state: it shows nothing
                continue
        return confirmed

    # --- time ---------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        count = len(self._queue)
        # All have the same time, so the first is late before the others.
        while self._queue and now_s >= self._queue[0].until_s:
            request = self._queue.pop(0)
            error = ActionTimeoutError(
                request.id,
                self._terms.timeout_s,
                was_sent=request.was_sent,
                why=self._why_unsent(request.asked_s),
            )
            self._emit(Settle(request.id, error))
        if len(self._queue) < count:
            self._on_changed()
        self._pursue(now_s)

    def due_s(self) -> float:
        if not self._queue:
            return math.inf
        first = self._queue[0]
        is_to_send = self._is_in and not first.is_sent
        return min(first.until_s, first.not_before_s) if is_to_send else first.until_s

    def end(self, error: RoomError) -> None:
        queue, self._queue = self._queue, []
        for request in queue:
            self._emit(Settle(request.id, error))
        if queue:
            self._on_changed()
