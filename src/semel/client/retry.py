"""When to send a request again, and after how long: values in, a value out.

`decide` is the whole policy of all three clients. It is told how a try ended, and how often and
how long it has been tried; time and chance are arguments, so nothing here sleeps or guesses.

Sending again is safe when the server can tell a repeat by its key, or when the method says that
a repeat does no harm. An answer from somebody in between (502, 504) says nothing about what the
server did, and with a key it need not: a repeat gets the recorded response.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal, TypeAlias, assert_never

from semel.errors import SettingsError
from semel.values import value

# What says "not now": timed out, too early, too many, bad gateway, unavailable, gateway timeout.
# 500 is not among them: a server that answers it may have recorded it, or have failed half-way.
PASSING: Final = frozenset({408, 425, 429, 502, 503, 504})

_CLIENT_ERROR: Final = 400
_CONFLICT: Final = 409
_SERVER_ERROR: Final = 500

PROBLEM: Final = "urn:semel:problem:"
IN_PROGRESS: Final = PROBLEM + "in-progress"

SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
IDEMPOTENT: Final = SAFE | {"PUT", "DELETE"}
"""RFC 9110, section 9.2.2."""


@dataclass(frozen=True)
class Patience:
    """How often, for how long, and after which statuses a request is sent again.

    At most `tries` tries, the first one included; none begins later than `within_s` seconds after
    the first. An answer that the first request is still being worked on is no failed try: it is
    asked for again until the time is up. The pause is what `Retry-After` says, or a random part
    of `backoff_s`, doubled with every try; never more than `longest_s`. A 409 is decided by what
    it says, unless it is among `statuses`.
    """

    tries: int = 5
    within_s: float = 60.0
    backoff_s: float = 0.5
    longest_s: float = 30.0
    statuses: AbstractSet[int] = PASSING

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise SettingsError(f"tries={self.tries!r}: the first one counts, so give 1 or more")
        for name in ("within_s", "backoff_s", "longest_s"):
            if not getattr(self, name) >= 0:
                raise SettingsError(f"{name}={getattr(self, name)!r} must be seconds, 0 or more")


# --- how a try ended ----------------------------------------------------------------------------


@value
class Head:
    """What an answer says, as far as it bears on trying again.

    `told` is the server's own word (`Stripe-Should-Retry`), `problem` the type of its problem
    document. `cut`: it may have broken off in its head.
    """

    status: int
    retry_after_s: float | None = None
    told: bool | None = None
    problem: str | None = None
    cut: bool = False


@value
class Fault:
    """No answer came, or not all of it. `passing`: it may well be gone next time."""

    passing: bool = True


Ending: TypeAlias = Head | Fault


def head_of(
    status: int,
    headers: Mapping[str, str],
    *,
    wall_s: float,
    body: bytes | None = None,
    cut: bool = False,
) -> Head:
    """Read an answer. `headers` finds names in any case; `body` is there if it was read."""
    return Head(
        status,
        _retry_after_s(headers.get("Retry-After"), headers.get("Date"), wall_s),
        {"true": True, "false": False}.get(headers.get("Stripe-Should-Retry", "").lower()),
        _problem(body) if body and is_problem(headers) else None,
        cut,
    )


def is_problem(headers: Mapping[str, str]) -> bool:
    return media_type(headers) == "application/problem+json"


def media_type(headers: Mapping[str, str]) -> str:
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()


def _problem(body: bytes) -> str | None:
    try:
        document: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    found = document.get("type") if isinstance(document, dict) else None
    return found if isinstance(found, str) else None


def _retry_after_s(text: str | None, date: str | None, wall_s: float) -> float | None:
    """Seconds, or a date, which is compared with the server's own clock where it tells it."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        due = _epoch_s(text)
        if due is None:
            return None
        now = _epoch_s(date) if date is not None else None
        return max(0.0, due - (wall_s if now is None else now))
    return None if math.isnan(seconds) else max(0.0, seconds)


def _epoch_s(text: str) -> float | None:
    try:
        moment: datetime = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()


# --- what to do ---------------------------------------------------------------------------------


@value
class Sent:
    """What has been tried so far. `repeatable`: a repeat does no harm, and can be sent."""

    tries: int
    elapsed_s: float
    repeatable: bool


@value
class Again:
    """Send it again, after a pause."""

    delay_s: float


@value
class Stop:
    """Hand over what there is, an answer or an error."""

    why: Literal["final", "unrepeatable", "tries", "time"]


Decision: TypeAlias = Again | Stop


def decide(patience: Patience, sent: Sent, ending: Ending, chance: float) -> Decision:
    """`chance` is between 0 and 1, and new for every try."""
    if not _asks_for_more(patience, ending):
        return Stop("final")
    if not sent.repeatable:
        return Stop("unrepeatable")
    if sent.tries >= patience.tries and not (patience.tries > 1 and is_running(ending)):
        return Stop("tries")
    delay_s = _delay_s(patience, sent.tries, ending, chance)
    if sent.elapsed_s + delay_s > patience.within_s:
        return Stop("time")
    return Again(delay_s)


def _asks_for_more(patience: Patience, ending: Ending) -> bool:
    match ending:
        case Fault():
            return ending.passing
        case Head(cut=True):
            return True
        case Head(told=bool(told)):
            return told and ending.status >= _CLIENT_ERROR
        case Head(status=status) if status in patience.statuses:
            return True
        case Head():
            return is_running(ending)
        case _:
            assert_never(ending)


def is_running(head: Ending) -> bool:
    """A conflict that ends by itself: the first request is still being worked on."""
    if isinstance(head, Fault) or head.status != _CONFLICT:
        return False
    if head.problem is not None and head.problem.startswith(PROBLEM):
        return head.problem == IN_PROGRESS
    return head.retry_after_s is not None


def _delay_s(patience: Patience, tries: int, ending: Ending, chance: float) -> float:
    asked_s = ending.retry_after_s if isinstance(ending, Head) else None
    if asked_s:  # 0 says "when you like": at once, with everybody else, is not when we like
        return min(asked_s, patience.longest_s)
    # Full jitter: clients that failed together do not come back together. No float is 2.0 ** 1024.
    ceiling_s = patience.backoff_s * 2.0 ** min(tries - 1, 60)
    return chance * min(ceiling_s, patience.longest_s)


# --- was that the answer? -----------------------------------------------------------------------

# The request goes on elsewhere (307, 308), or is asked for again with credentials (401, 407).
_GOES_ON: Final = frozenset({307, 308, 401, 407})
_UNSETTLED: Final = frozenset(PROBLEM + name for name in ("outcome-unknown", "key-reused"))


def settles(patience: Patience, head: Head) -> bool:
    """Does this answer say how the request ended? If not, only a repeat with its key will."""
    return not (
        head.status >= _SERVER_ERROR
        or head.status in PASSING | _GOES_ON
        or head.problem in _UNSETTLED
        or is_running(head)
        or _asks_for_more(patience, head)
    )
