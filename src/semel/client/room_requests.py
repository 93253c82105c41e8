"""What a client wants done at a table, until it is: one request after the other, each once.

A request keeps its id and its number, however often it is sent: after a reconnect, and when the
server says that nothing was decided. It ends with an answer, or when its time is up. Until the
confirmed state shows what came of it, it is shown on top of that. Nothing here waits or sends;
room_requests.ts is its twin.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from semel.client.room_reading import Payload, seconds, text, whole
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
        self, id: str, seq: int | None, action: Any, guard: str | None, until_s: float
    ) -> None:
        self.id = id
        self.seq = seq
        self.action = action
        self.guard = guard
        self.until_s = until_s
        self.not_before_s = -math.inf
        self.is_sent = False
        self.was_sent = False
        self.version = 0  # from which on the confirmed state shows it


class Requests:
    """`changed` is called when what is pending has changed; `stale` when a snapshot is needed.

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
    ) -> None:
        self._table_id = table_id
        self._client_id = client_id
        self._terms = terms
        self._seq = seq
        self._optimistic = optimistic
        self._emit = emit
        self._on_changed = changed
        self._on_stale = stale
        self._backoff = Backoff(terms, chance)
        self._is_in = False
        self._queue: list[Request] = []
        self._done: list[Request] = []  # and not seen yet
        self._numbers: dict[str, int | None] = {}
        self._reached = 0
        self._reached_at_s = -math.inf

    @property
    def pending(self) -> int:
        return len(self._done) + len(self._queue)

    def is_settled(self, version: int | None) -> bool:
        """Is nothing on its way, and everything to be seen that was answered?"""
        return not self._queue and version is not None and version >= self._reached

    # --- asking -------------------------------------------------------------------------------

    def twin(self, guard: str | None, request_id: str | None) -> str | None:
        """The request on its way that is the same as this one."""
        for request in self._queue:
            if request.id == request_id or (guard is not None and request.guard == guard):
                return request.id
        return None

    def add(self, now_s: float, id: str, action: Any, guard: str | None) -> None:
        until_s = now_s + self._terms.timeout_s
        self._queue.append(Request(id, self._number(id), action, guard, until_s))
        self._on_changed()
        self._pursue(now_s)

    def _number(self, id: str) -> int | None:
        if id not in self._numbers:
            self._seq = None if self._seq is None else self._seq + 1
            self._numbers[id] = self._seq
        if len(self._numbers) > REMEMBERED:
            del self._numbers[next(iter(self._numbers))]
        return self._numbers[id]

    def _pursue(self, now_s: float) -> None:
        if not self._is_in or not self._queue:
            return
        first = self._queue[0]
        if first.is_sent or now_s < first.not_before_s:
            return
        first.is_sent = first.was_sent = True
        self._emit(Send(self._message(first)))

    def _message(self, request: Request) -> Mapping[str, Any]:
        named = {"type": "ACTION_REQUEST", "requestId": request.id}
        seq = request.seq
        numbered = {} if seq is None else {"clientId": self._client_id, "clientSeq": seq}
        return {**named, **numbered, "payload": {**request.action, "tableId": self._table_id}}

    # --- the connection -----------------------------------------------------------------------

    def joined(self, now_s: float) -> None:
        self._is_in = True
        self._pursue(now_s)

    def lost(self) -> None:
        """What was sent may not have come, or its answer may not: it is sent again."""
        self._is_in = False
        for request in self._queue:
            request.is_sent = False

    # --- answers ------------------------------------------------------------------------------

    def result(self, now_s: float, request_id: str | None, payload: Payload, at: int) -> None:
        """The answer to a request; `at` is the version that is confirmed."""
        request = next((each for each in self._queue if each.id == request_id), None)
        if request is None:
            return
        version = whole(payload.get("stateVersion")) or 0
        error = payload.get("error")
        if payload.get("success") is not True:
            self._failed(now_s, request, error if isinstance(error, dict) else {}, version)
            return
        self._reach(now_s, version)
        self._queue.remove(request)
        reply, action = payload.get("reply"), payload.get("action")
        cached = payload.get("cached") is True
        self._emit(Settle(request.id, ActionResult(request.id, reply, version, cached, action)))
        if version > at:
            request.version = version
            self._done.append(request)
        else:
            self._on_changed()
        self._next(now_s)

    def refused(self, now_s: float, request_id: str | None, error: Payload) -> bool:
        """A request was answered with an error that is no result: was it ours?"""
        request = next((each for each in self._queue if each.id == request_id), None)
        if request is not None:
            self._failed(now_s, request, error, 0)
        return request is not None

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
        if version > self._reached:
            self._reached, self._reached_at_s = version, now_s

    # --- what is shown ------------------------------------------------------------------------

    def seen(self, version: int) -> None:
        """The confirmed state is this far."""
        self._done = [request for request in self._done if request.version > version]

    def forget(self) -> None:
        """What was done may have been taken back: the confirmed state is all that counts."""
        self._done = []
        self._reached = 0

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
        for request in [*self._done, *self._queue]:
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
        late = [request for request in self._queue if now_s >= request.until_s]
        self._queue = [request for request in self._queue if now_s < request.until_s]
        for request in late:
            timeout_s, was_sent = self._terms.timeout_s, request.was_sent
            error = ActionTimeoutError(request.id, timeout_s, was_sent=was_sent)
            self._emit(Settle(request.id, error))
        if late:
            self._on_changed()
        self._pursue(now_s)

    def due_s(self) -> float:
        due_s = min((request.until_s for request in self._queue), default=math.inf)
        first = self._queue[0] if self._queue else None
        if self._is_in and first is not None and not first.is_sent:
            return min(due_s, first.not_before_s)
        return due_s

    def end(self, error: RoomError) -> None:
        queue, self._queue = self._queue, []
        for request in queue:
            self._emit(Settle(request.id, error))
