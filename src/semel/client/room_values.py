"""What a room's client hands over, what it does, and what goes wrong, as values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from semel.errors import SemelError
from semel.values import value

# --- what goes wrong ----------------------------------------------------------------------------


class RoomError(SemelError):
    """The table cannot be had, or not any more. `code` is the server's word for it, or ours."""

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class ActionError(SemelError):
    """An action was refused: nothing was changed by it. `code` says why.

    By the server; or, if `was_sent` is False, before it was sent: the server would not take it.
    """

    def __init__(self, code: str, message: str, *, request_id: str, was_sent: bool = True) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code
        self.message = message
        self.request_id = request_id
        self.was_sent = was_sent


class ActionTimeoutError(SemelError, TimeoutError):
    """No answer came in time. Unless `was_sent` is False, nobody knows what became of the action.

    It is False only of what was never sent under this id, as far as this client can know; then the
    message says why, if anybody knows.

    To ask again, and not to do it twice: `act(action, request_id=error.request_id)`.
    """

    def __init__(self, request_id: str, timeout_s: float, *, was_sent: bool, why: str = "") -> None:
        unknown = f"the outcome is unknown; ask again with request_id={request_id!r}"
        unsent = "it was never sent: nothing was changed by it" + (f"; {why}" if why else "")
        super().__init__(f"no answer in {timeout_s:g} s: {unknown if was_sent else unsent}")
        self.request_id = request_id
        self.was_sent = was_sent


# --- what is handed over ------------------------------------------------------------------------

Status: TypeAlias = Literal["connecting", "open", "waiting", "closed", "failed"]
"""Getting in; in; between two connections; closed by us; given up."""


@value
class State:
    """How the table looks now. It is not yours to change.

    `confirmed` is what the server says, at `version`; `state` is that with the actions of this
    client made already that are not in it. `pending` are not answered, or not to be seen yet.
    `viewer` is whose view it is; None is everybody's.
    """

    state: Any
    confirmed: Any
    version: int
    viewer: str | None
    pending: int


@value
class Event:
    """Something that happened, with the change that made this version."""

    version: int
    data: Any


@value
class Result:
    """What came of a hand that is finished."""

    version: int
    result: Any


@value
class Presence:
    """Who is there now."""

    users: tuple[str, ...]
    spectators: int


@value
class TurnedAway:
    """The server does not let us in, and says why; whether for good, the status says."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" if self.message else self.code


@value
class Became:
    """The connection is this now; `turned_away`, if the server did not let us in last time."""

    status: Status
    turned_away: TurnedAway | None = None


@value
class Trouble:
    """An error of the server's that belongs to nothing that was asked for."""

    code: str
    message: str


News: TypeAlias = State | Event | Result | Presence | Became | Trouble


@value
class ActionResult:
    """The server has done it, and this is its reply. `cached`: it had done so before."""

    request_id: str
    reply: Any
    version: int
    cached: bool
    action: Any


# --- what to do ---------------------------------------------------------------------------------

Why: TypeAlias = Literal[
    "ended", "silence", "drained", "overloaded", "told", "unauthorized", "left"
]
"""Why somebody hangs up: the connection has ended, or could not be made; it fell silent; its server
ends, or has too much to do; it was told when to come back; for another token; it was shown out."""

Reason: TypeAlias = Literal["gap", "reconnect", "manual", "stale"]
"""Why a snapshot is asked for."""


@value
class Open:
    """Make a connection, and give up if there is none `within_s`."""

    within_s: float


@value
class HangUp:
    """End the connection, whatever it is at. There will be another in `after_s`."""

    after_s: float
    why: Why


@value
class Send:
    """Say this."""

    message: Mapping[str, Any]


@value
class Deliver:
    """Hand this over."""

    news: News


@value
class Settle:
    """A request is answered, or will not be."""

    request_id: str
    answer: ActionResult | SemelError


@value
class Wait:
    """Nothing to do for so long, unless something happens."""

    within_s: float


@value
class Over:
    """Hang up. There is nothing more, or an error to be raised."""

    error: RoomError | None = None


Step: TypeAlias = Open | HangUp | Send | Deliver | Settle | Wait | Over
Emit: TypeAlias = Callable[[Step], None]


# --- patience -----------------------------------------------------------------------------------


@value
class Terms:
    """How patient a client is. Durations are seconds.

    `timeout_s`: from an action to its answer. `resync_s`: from asking for a snapshot to having it;
    it grows with every one that does not come. `grace_s`: so long after the server has said that
    there is more than we have, it should have come. `connect_s`: to connect, and then to get in.
    `heartbeat_s`: until the server says its own; two and a half without a word are silence.
    `backoff_s`: the pause before trying again; it doubles, up to `longest_s`. `buffered`: updates
    that are kept while the one before them is missing. `pending`: actions that may wait for their
    answer; one more is refused, since they are sent one after the other, and would be too late.
    """

    timeout_s: float = 10.0
    resync_s: float = 5.0
    grace_s: float = 2.0
    connect_s: float = 10.0
    heartbeat_s: float = 15.0
    backoff_s: float = 1.0
    longest_s: float = 30.0
    buffered: int = 256
    pending: int = 100


class Backoff:
    """Pauses that grow: from half the first one, at random, up to twice the last one's most.

    `most_s` is as long as one may get; the first one may always be what it is.
    """

    def __init__(self, terms: Terms, chance: Callable[[], float]) -> None:
        self._terms = terms
        self._chance = chance
        self._failures = 0

    def pause_s(self, most_s: float = math.inf) -> float:
        self._failures += 1
        return self.same_s(most_s)

    def same_s(self, most_s: float = math.inf) -> float:
        """After the same failure: another chance."""
        base_s = self._terms.backoff_s
        doubled_s = base_s * 2.0 ** min(max(0, self._failures - 1), 30)
        ceiling_s = min(doubled_s, self._terms.longest_s, max(base_s, most_s))
        return base_s / 2 + self._chance() * (ceiling_s - base_s / 2)

    def reset(self) -> None:
        self._failures = 0
