"""What a room is: pure functions over a state, written by whoever makes the game. Pure.

    class Tally(Room):
        def begin(self, room_id):
            return {"count": 0}

        def apply(self, state, action, ctx):
            if action.get("actionType") != "add":
                return Refused("INVALID", "there is nothing to do but add")
            return Accepted({"count": state["count"] + 1}, reply={"by": ctx.user})

        def view(self, state, viewer):
            return state

The easy mistake is to look at anything else: a clock, a global, a random number that is not
`ctx.random`. Two servers may apply the same action, and one of them is told to do it again on
another state.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, Final, Literal, TypeAlias

from semel.errors import SettingsError
from semel.rooms.names import MOST_TURN
from semel.values import value

__all__ = [
    "ALL",
    "Accepted",
    "Audience",
    "Context",
    "Deadline",
    "Decision",
    "Event",
    "Refused",
    "Room",
]

ALL: Final = "all"
"""The audience of what everybody may see."""

Audience: TypeAlias = Literal["all"] | Iterable[str]
"""Everybody, or the users that are named."""

Event: TypeAlias = tuple[Audience, Any]
"""Who is told, and what: anything that JSON can say."""


@value
class Context:
    """What an action may know besides the state.

    `user` is who acts; None for a timeout and for the system itself. `version` is the one that the
    action makes if it is accepted. `now_s` is the time by the store's clock, in seconds since 1970.
    `entropy` are 32 secret random bytes, new for every try.
    """

    room_id: str
    user: str | None
    version: int
    now_s: float
    entropy: bytes
    _drawn: list[random.Random] = field(
        default_factory=list, init=False, repr=False, compare=False, hash=False
    )

    @property
    def random(self) -> random.Random:
        """One for the whole try, whose numbers nobody can guess. The next try has another one."""
        if not self._drawn:  # most actions need none
            self._drawn.append(random.Random(self.entropy))  # noqa: S311 - of 256 secret bits
        return self._drawn[0]


@value
class Accepted:
    """The state is this from now on; whoever asked is told `reply`.

    `events` are told besides how the state looks now, each to its audience, once: what happened, as
    opposed to how things stand.
    """

    state: Any
    reply: Any = None
    events: Sequence[Event] = ()


@value
class Refused:
    """Nothing changes, and whoever asked is told why. The same request gets the same answer."""

    code: str = "INVALID"
    message: str = ""


Decision: TypeAlias = Accepted | Refused


@value
class Deadline:
    """Until when a turn may be played, by the store's clock, in seconds since 1970.

    `turn` names it, and no other turn of this room ever: it is timed out once.
    """

    turn: str
    at_s: float


# The year 5138. Whoever means milliseconds is beyond that.
MOST_S = 1e11


def checked(deadline: Any) -> Deadline | None:
    """What rules gave for one, if it is; else `SettingsError`."""
    match deadline:
        case None:
            return None
        case Deadline(_, int() | float() as at_s) if math.isfinite(at_s) and at_s > MOST_S:
            raise SettingsError(
                f"deadline gave at_s={at_s:.0f}, which never comes: it is in seconds since 1970, "
                "as ctx.now_s is, and not in milliseconds"
            )
        case Deadline(str(turn), int() | float() as at_s) if math.isfinite(at_s):
            if 0 < len(turn.encode()) <= MOST_TURN and turn.isprintable():
                return deadline
    raise SettingsError(
        f"deadline gave {deadline!r:.80}; it is to give Deadline(turn, at_s), with a turn of up to "
        f"{MOST_TURN} bytes that can be printed, or None"
    )


class Room(ABC):
    """The rules of one kind of room. Its methods are pure, and change nothing they are given.

    States, actions, replies, events and views are what JSON can say, with text as keys: any other
    key is an error that says where it is. Tuples come back as lists.
    """

    view_version: str = ""
    """Of what is shown: change it when `view` changes, and who comes back gets a snapshot."""

    def begin(self, room_id: str) -> Any:
        """The state of a room in which nothing has happened yet."""
        return {}

    @abstractmethod
    def apply(self, state: Any, action: Mapping[str, Any], ctx: Context) -> Decision:
        """What becomes of an action."""

    @abstractmethod
    def view(self, state: Any, viewer: str | None) -> Any:
        """What a member of the room is shown of the state; None stands for everybody else.

        Of the state, and nothing else: what is set in the room's own object may be set otherwise
        on another server, or after a restart.
        """

    def members(self, state: Any) -> Iterable[str]:
        """The users who are shown something of their own."""
        return ()

    def deadline(self, state: Any) -> Deadline | None:
        """Until when the turn may be played; None while nobody is waited for."""
        return None

    def timeout(self, state: Any, turn: str, ctx: Context) -> Decision:
        """What becomes of a turn that was not played in time."""
        return Refused("INVALID", "this room knows no timeouts")

    def result(self, state: Any, viewer: str | None) -> Any:
        """What came of a hand that is finished, as long as the state still shows it; else None."""
        return None
