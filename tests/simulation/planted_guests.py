"""Room clients that look right, each with one defect; all of them have to be found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from semel.client.room_replica import Replica
from semel.client.room_requests import Requests
from semel.client.room_rules import Guest
from semel.entries import Position


class ComparesVersions(Replica):
    """Version 7 follows version 6, whichever that was."""

    def update(self, now_s: float, payload: Any, request_id: str | None) -> None:
        at = self.position
        if at is not None and payload["previousVersion"] == at.offset:
            payload = {**payload, "previous": str(at)}
        super().update(now_s, payload, request_id)


class TakesWhatIsLarger(Replica):
    """A larger number is news, whatever is missing before it."""

    def update(self, now_s: float, payload: Any, request_id: str | None) -> None:
        at = self.position
        if at is not None and payload["stateVersion"] > at.offset:
            payload = {**payload, "previous": str(at), "previousVersion": at.offset}
        super().update(now_s, payload, request_id)


class TakesWhatComes(Replica):
    """A connection does not repeat itself."""

    def update(self, now_s: float, payload: Any, request_id: str | None) -> None:
        previous = Position.parse(payload["previous"])
        if self.position is not None and payload["stateVersion"] <= self.position.offset:
            self.position = previous
        super().update(now_s, payload, request_id)


class TakesAnySnapshot(Replica):
    """A snapshot is the truth, however long it was on its way."""

    def _is_welcome(self, payload: Any, position: Position, ask: Any) -> bool:
        return True


class AsksOnce(Replica):
    """A snapshot that was asked for will come."""

    def tick(self, now_s: float) -> None:
        if self._ask is not None:
            self._ask = replace(self._ask, until_s=float("inf"))
        super().tick(now_s)


class BelievesSilence(Replica):
    """What the server says of its end is nothing to it: what is missing comes with the next one."""

    def heard(self, now_s: float, head: Position | None) -> None:
        pass


class KeepsItsState(Replica):
    """A snapshot is for those who have nothing yet."""

    def snapshot(self, now_s: float, payload: Any, request_id: str | None) -> None:
        if self.position is None:
            super().snapshot(now_s, payload, request_id)
        else:
            self._ask = self._wanted = None


class SendsAnew(Requests):
    """What is sent again is sent as a new request."""

    def lost(self) -> None:
        super().lost()
        for request in self._queue:
            if request.was_sent:
                request.id += "n"


class CountsResends(Requests):
    """Each message has its number, also the one that is sent again."""

    def _number(self, id: str) -> int | None:
        self._numbers.pop(id, None)
        return super()._number(id)

    def lost(self) -> None:
        super().lost()
        for request in self._queue:
            request.seq = self._number(request.id)


class ShowsResultsAgain(Guest):
    """A result that comes is shown."""

    def _result(self, payload: Any) -> None:
        self._results = []
        super()._result(payload)
