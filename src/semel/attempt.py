"""One try at an effect, as its own body sees it, and which one is running here.

The flow behind an attempt is `semel.call.Call`; this is the side of it that is shown.
"""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from semel import keys
from semel.colour import after_fork
from semel.errors import ClaimLostError, SettingsError
from semel.values import Claim, Key

if TYPE_CHECKING:
    from semel.call import Call

NOTHING: Mapping[str, bytes] = {}


class Attempt:
    """One try at an effect, as its own body sees it."""

    # What few attempts ever change is kept on the class: making one is on every call's way.
    asked = False
    lost = False
    _copied = False
    _unrecorded = False
    _value: Any = None
    _steps: Mapping[str, bytes] = NOTHING
    _taken: frozenset[str] = frozenset()

    def __init__(self, key: Key, claim: Claim | None, call: Call) -> None:
        self._key = key
        self.claim = claim
        self._call: Call | None = call
        self._parent = CURRENT.get()
        self._active = claim is not None

    @property
    def key(self) -> str:
        """The key, readable."""
        return self._key.text

    @property
    def tenant(self) -> str:
        return self._key.tenant

    @property
    def operation(self) -> str:
        return self._key.operation

    @property
    def fence(self) -> int:
        """Grows with every holder of this key; hand it to whatever can compare it."""
        return self.claim.fence if self.claim else 0

    @property
    def number(self) -> int:
        """Which try this is, from 1."""
        return self.claim.number if self.claim else 0

    @property
    def replayed(self) -> bool:
        """Did it happen before? Only `once` with on_duplicate="return" or "wait" shows a True."""
        self.asked = True
        return self.claim is None

    @property
    def result(self) -> Any:
        """What was recorded, on a replay; what `done` was given, else."""
        return self._value

    @property
    def call(self) -> Call:
        """The flow behind this attempt, while it lasts."""
        if self._call is None:
            raise SettingsError(
                f"the attempt at {self.key!r} is over; take its steps before its body returns"
            )
        return self._call

    def done(self, value: Any) -> None:
        """Set the result that `once` records when the block ends."""
        self._value = value

    def child_key(self, name: str) -> str:
        """A key for a receiver of your own calls: the same over every attempt at this effect.

        Hand it to a payment provider as its idempotency key, one name per call you make.
        """
        return keys.child_key(self._key.id, name)

    def raise_if_lost(self) -> None:
        """Stop here if somebody took over meanwhile; worth asking before each costly part."""
        if self.lost:
            raise ClaimLostError(
                f"the claim on {self.key!r} was taken over; stop, and let the new holder finish",
                key=self.key,
            )

    def __repr__(self) -> str:
        return f"Attempt(key={self.key!r}, number={self.number}, fence={self.fence})"


CURRENT: contextvars.ContextVar[Attempt | None] = contextvars.ContextVar(
    "semel_attempt", default=None
)


def leave(token: contextvars.Token[Attempt | None]) -> None:
    """Be again where we were; a coroutine closed by the garbage collector was nowhere."""
    try:  # noqa: SIM105 - on every call, where suppress() costs more than the rest
        CURRENT.reset(token)
    except ValueError:
        pass


def _mark_copies() -> None:
    """A child forked inside a body has a copy of the attempt; only the parent may end it."""
    attempt = CURRENT.get()
    while attempt is not None:
        attempt._copied = True
        attempt = attempt._parent


after_fork(_mark_copies)


def current() -> Attempt:
    """The attempt whose body is running right now."""
    attempt = CURRENT.get()
    if attempt is None:
        raise SettingsError(
            "no guarded call is running here; call this inside an @idempotent function or a "
            "`with once(...)` block"
        )
    return attempt
