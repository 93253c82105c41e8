"""The settings of a guard, checked where the guard is made.

A setting that would void the guarantee is refused here, with what to write instead: an error at
import is cheaper than a second charge.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

from semel.codec import CODEC, Codec
from semel.errors import SettingsError
from semel.values import Survives, Terms

if TYPE_CHECKING:
    from semel.attempt import Attempt

Seconds = float | int | timedelta
OnDuplicate = Literal["return", "raise", "wait"]
OnFailure = Literal["unlock", "lock"]
OnUnavailable = Literal["raise", "run"]

MIB = 1024 * 1024

# The lease of a guard that names none, in seconds. A shorter ttl shortens it.
DEFAULT_LEASE_S = 30.0


# --- what `recover` may answer ------------------------------------------------------------------


# A date so far ahead cannot be written in every store.
LONGEST_S = 100 * 366 * 86_400


@dataclass(frozen=True, slots=True)
class Recovered:
    """The lost attempt's effect did happen, with this result: record it, do not run."""

    value: Any = None


@dataclass(frozen=True, slots=True)
class Retry:
    """The lost attempt's effect did not happen: run."""


@dataclass(frozen=True, slots=True)
class CannotTell:
    """Nobody can say: leave it unknown. The next call asks again."""


Finding = Recovered | Retry | CannotTell
Recover = Callable[["Attempt"], "Finding | Awaitable[Finding]"]
OnCrash = Literal["retry", "hold"] | Recover


# --- policy -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings of one guard, checked when it is made."""

    terms: Terms
    on_duplicate: OnDuplicate
    on_failure: OnFailure
    on_unavailable: OnUnavailable
    recover: Recover | None
    interrupted: Literal["release", "abandon"]
    wait_s: float
    max_run_s: float
    max_waiters: int
    max_result: int
    codec: Codec
    require: frozenset[Survives]


def make_policy(
    *,
    ttl: Seconds | None,
    lease: Seconds | None,
    wait_timeout: Seconds,
    max_run: Seconds,
    max_waiters: int,
    max_result: int,
    on_duplicate: OnDuplicate,
    on_failure: OnFailure,
    on_crash: OnCrash,
    on_unavailable: OnUnavailable,
    codec: Codec | None,
    require: str | Iterable[str],
) -> Policy:
    ttl_s = None if ttl is None else _positive("ttl", ttl)
    lease_s = _default_lease(ttl_s) if lease is None else _positive("lease", lease)
    max_run_s = _positive("max_run", max_run)
    if ttl_s is not None and lease_s > ttl_s:
        raise SettingsError(
            f"lease={lease_s:g}s is longer than ttl={ttl_s:g}s: the record would be forgotten "
            "while it is still being worked on; make ttl at least as long as lease"
        )
    if max_run_s < lease_s:
        raise SettingsError(
            f"max_run={max_run_s:g}s is shorter than lease={lease_s:g}s; a holder keeps its key "
            "for at least one lease, so make max_run at least as long"
        )
    limits: tuple[tuple[str, Any], ...] = (("max_waiters", max_waiters), ("max_result", max_result))
    for name, most in limits:
        if not isinstance(most, int) or most < 1:
            raise SettingsError(f"{name}={most!r} must be a whole number of at least 1")
    if codec is not None and not (hasattr(codec, "encode") and hasattr(codec, "decode")):
        raise SettingsError(f"codec={codec!r} cannot work; it needs encode(value) and decode(data)")
    _one_of("on_duplicate", on_duplicate, ("return", "raise", "wait"))
    _one_of("on_failure", on_failure, ("unlock", "lock"))
    _one_of("on_unavailable", on_unavailable, ("raise", "run"))
    if not callable(on_crash):
        _one_of("on_crash", on_crash, ("retry", "hold"), "or a function recover(attempt)")
    if on_unavailable == "run" and (require or on_crash != "retry"):
        raise SettingsError(
            "on_unavailable='run' runs unguarded when the store is down, which voids "
            "require= and on_crash=; drop one of them"
        )
    recover = on_crash if callable(on_crash) else None
    return Policy(
        terms=Terms(
            lease_s=lease_s, ttl_s=ttl_s, takeover=on_crash != "hold", hold=on_crash != "retry"
        ),
        on_duplicate=on_duplicate,
        on_failure=on_failure,
        on_unavailable=on_unavailable,
        recover=recover,
        interrupted="release" if on_crash == "retry" else "abandon",
        wait_s=_positive("wait_timeout", wait_timeout),
        max_run_s=max_run_s,
        max_waiters=max_waiters,
        max_result=max_result,
        codec=codec or CODEC,
        require=_requirements(require),
    )


def _default_lease(ttl_s: float | None) -> float:
    return DEFAULT_LEASE_S if ttl_s is None else min(DEFAULT_LEASE_S, ttl_s)


def _positive(name: str, value: Seconds) -> float:
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SettingsError(f"{name}={value!r} is not a duration; give seconds or a timedelta")
    if not 0 < value < float("inf"):
        raise SettingsError(f"{name}={value!r} must be more than zero and finite")
    if value > LONGEST_S:
        raise SettingsError(
            f"{name}={value!r} is more than a hundred years; to keep a record for ever, ttl=None"
        )
    return float(value)


def _one_of(name: str, value: object, choices: tuple[str, ...], also: str = "") -> None:
    if value not in choices:
        named = ", ".join(repr(c) for c in choices)
        raise SettingsError(f"{name}={value!r} is unknown; choose one of {named} {also}".strip())


def _requirements(require: str | Iterable[str]) -> frozenset[Survives]:
    names = {require} if isinstance(require, str) and require else set(require)
    for name in names:
        _one_of("require", name, ("process_crash", "power_loss", "failover"))
    return cast("frozenset[Survives]", frozenset(names))
