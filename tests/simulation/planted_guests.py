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


# --- what is shown before it is answered --------------------------------------------------------


class WaitsForTheAnswer(Requests):
    """It is shown on top until it is answered, whatever the state has by then."""

    def updated(self, version: int, request_id: str | None) -> None:
        super().updated(version, None)


class TakesTheAnswerForTheState(Requests):
    """What is answered is done, and need not be shown any more; the state has it soon."""

    def result(self, *told: Any) -> None:
        super().result(*told)
        self._done = []
        self._on_changed()


class LeavesWhatWasRefused(Requests):
    """The next state will show what is right."""

    def _failed(self, now_s: float, request: Any, *told: Any) -> None:
        super()._failed(now_s, request, *told)
        if request not in self._queue:
            request.version = float("inf")
            self._done = [*self._done, request]


class StaysOnItsGround(Requests):
    """On top of the state there was when somebody clicked: the next one comes when it is done."""

    _ground: Any = None

    def shown(self, confirmed: Any) -> Any:
        if not self._queue:
            self._ground = confirmed
        return super().shown(self._ground or confirmed)


class ShowsItOnAnySnapshot(Requests):
    """It is not answered, so no state has it."""

    def replaced(self, version: int) -> None:
        self.updated(version, None)
