"""What a key means for which requests: the settings of a door, checked when it is made."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import InitVar, dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypeAlias, cast
from weakref import WeakSet

from semel import keys
from semel.errors import SettingsError
from semel.http import protocol
from semel.http.protocol import Fingerprint, Request, Response
from semel.policy import MIB, OnCrash, Policy, Recover, Recovered, Seconds, make_policy
from semel.ports import StoreLedger

Scope: TypeAlias = str | Callable[[Request], "str | Awaitable[str]"]
OnError: TypeAlias = Literal["release", "store", "hold"]

# A caller who was not let in, came too often or sent too much has had no effect: the answer to
# its next try may be another.
NEVER_STORED = frozenset({401, 403, 408, 413, 425, 429})

# Said by a router that found no handler; stored only where we know that there was one.
NO_ROUTE = frozenset({404, 405})

# Default of `ttl`, in seconds.
DAY_S = 86_400

NOT_GIVEN: Any = object()

FIRST_SERVER_ERROR = 500
FIRST_ERROR = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What an `Idempotency-Key` means for some requests.

    `key`: "optional", or "required", where a request without one is refused.
    `methods`: the ones it is for; others pass untouched.
    `ttl`: how long a response is remembered after it was recorded; None for ever. `retention` is
    an older spelling of it.
    `wait`: how long a request waits for another one with its key; 0 answers 409 at once.
    `on_error`: what a 5xx means, or an exception before the last byte: "release", a retry runs;
    "store", a retry gets the error; "hold", the outcome is unknown and must be settled first.
    `on_crash`: the same for a process that died, or a function that finds out; as `on_error`
    unless given.
    `stores`: which statuses below 500 are recorded, as a collection or a function. 401, 403, 408,
    413, 425 and 429 never are.
    `scope`: the tenant for these requests, if another than the door's.
    `fingerprint`: what has to be equal when a key comes again: "bytes" (method, path, query,
    body), "json" (the body as JSON, however it is written), None, or a function.
    `lease`, `max_run`: as for a guard; the lease is renewed while the handler runs.
    `max_body`, `max_response`: in bytes. A larger request is refused; a larger response is sent,
    and remembered without its body.
    `never_kept`: names of response headers that no replay carries, besides `Set-Cookie`, `Date`
    and those of the connection.
    `linger`: how long a response of unknown length may gather before it is sent on as a stream.
    """

    key: Literal["optional", "required"] = "optional"
    methods: Collection[str] = ("POST", "PATCH")
    ttl: Seconds | None = DAY_S
    wait: Seconds = 0
    on_error: OnError = "release"
    on_crash: OnError | Recover | None = None
    stores: Collection[int] | Callable[[int], bool] | None = None
    scope: Scope | None = None
    fingerprint: Fingerprint = "bytes"
    per_operation: bool = False
    lease: Seconds | None = None
    max_run: Seconds = 3600
    max_waiters: int = 64
    max_body: int = MIB
    max_response: int = MIB
    never_kept: Collection[str] = ()
    linger: Seconds = 0.5
    require: Collection[str] = ()
    retention: InitVar[Any] = NOT_GIVEN

    def __post_init__(self, retention: Any) -> None:
        if retention is NOT_GIVEN:
            return
        if self.ttl != DAY_S:
            raise SettingsError(
                f"retention is an older spelling of ttl; leave retention={retention!r} out, or "
                f"ttl={self.ttl!r}"
            )
        object.__setattr__(self, "ttl", retention)


def as_rule(given: object, name: str = "rule") -> Rule:
    """Return the rule that was given, or the default one; `SettingsError` if it is not a `Rule`."""
    if given is None:
        return Rule()
    if isinstance(given, Rule):
        return given
    inside = "..."
    if isinstance(given, Mapping):
        inside = ", ".join(f"{setting}={content!r}" for setting, content in given.items())
    raise SettingsError(
        f"{name}={given!r} is a {type(given).__name__}; write {name}=Rule({inside})"
    )


def changed(rule: Rule, changes: Mapping[str, Any]) -> Rule:
    """Return the rule with other settings. `retention` replaces the ttl that the rule has."""
    if "retention" in changes:
        rule = replace(rule, ttl=DAY_S)
    return replace(rule, **changes)


class Ruling:
    """A rule made ready: what a door looks up for every request."""

    def __init__(self, rule: Rule, scope: Scope, route: Route | None = None) -> None:
        _check(rule)
        self.route = route
        """The route that it is for; None for the rule of all others."""
        self.rule = rule
        self.required = rule.key == "required"
        self.methods = frozenset(method.upper() for method in rule.methods)
        self.scope = _scope(rule.scope if rule.scope is not None else scope)
        self.on_error = rule.on_error
        self.fingerprint: Fingerprint = rule.fingerprint
        self.per_operation = rule.per_operation
        self.max_body = rule.max_body
        self.max_response = rule.max_response
        self.linger_s = _linger(rule.linger)
        self.never_kept = frozenset(name.lower().encode("latin-1") for name in rule.never_kept)
        self.policy = _policy(rule)
        self.met_by: WeakSet[StoreLedger] = WeakSet()
        """The ledgers that have shown that they survive what the rule requires."""
        self._stores = rule.stores

    def keeps(self, status: int, *, routed: bool) -> bool:
        """Is a response of this status recorded? 5xx ones are another matter."""
        if status in NEVER_STORED or (status in NO_ROUTE and not routed):
            return False
        if self._stores is None:
            return True
        return self._stores(status) if callable(self._stores) else status in self._stores


def _policy(rule: Rule) -> Policy:
    return make_policy(
        ttl=rule.ttl,
        lease=rule.lease,
        wait_timeout=rule.wait or 1,
        max_run=rule.max_run,
        max_waiters=rule.max_waiters,
        # Head and body together; the door itself counts the body.
        max_result=rule.max_response + MIB,
        on_duplicate="wait" if rule.wait else "return",
        on_failure="unlock",
        on_crash=_on_crash(rule),
        on_unavailable="raise",
        codec=None,
        require=rule.require,
    )


def _on_crash(rule: Rule) -> OnCrash:
    chosen = rule.on_error if rule.on_crash is None else rule.on_crash
    if callable(chosen):
        return chosen
    if chosen == "store":
        return interrupted
    return "hold" if chosen == "hold" else "retry"


def interrupted(_attempt: Any) -> Recovered:
    """Asks nobody: what was begun and vanished is answered so from now on."""
    return Recovered(INTERRUPTED)


INTERRUPTED: Response = protocol.problem(
    "interrupted",
    "The request was begun and did not come to its end. It is not repeated: whether it took "
    "effect has to be found out in another way.",
)


def _check(rule: Rule) -> None:
    _one_of("key", rule.key, ("optional", "required"))
    _one_of("on_error", rule.on_error, ("release", "store", "hold"))
    if rule.on_crash is not None and not callable(rule.on_crash):
        _one_of("on_crash", rule.on_crash, ("release", "store", "hold"))
    if rule.on_error == "hold" and rule.on_crash in ("release", "store"):
        raise SettingsError(
            f"on_error='hold' with on_crash={rule.on_crash!r} cannot work: what is held after an "
            "error would be taken over as after a crash. Leave on_crash out, or make it 'hold' or "
            "a function that finds out"
        )
    _check_stores(rule)
    _check_names(rule)
    _check_sizes(rule)


def _check_stores(rule: Rule) -> None:
    """Asked when the handler has run: what is wrong with it must be found out before."""
    stores: Any = rule.stores
    if stores is None or callable(stores):
        return
    if not isinstance(stores, Collection) or not all(map(_is_int, stores)):
        raise SettingsError(
            f"stores={stores!r} must be a collection of statuses, such as (200, 201), or a "
            "function of one"
        )
    if never := NEVER_STORED & set(stores):
        named = ", ".join(map(str, sorted(never)))
        raise SettingsError(f"stores= names {named}, which say that nothing was done; leave it out")


def _check_names(rule: Rule) -> None:
    for name in ("methods", "never_kept"):
        given: Any = getattr(rule, name)
        if isinstance(given, str):
            raise SettingsError(f"{name}={given!r} is one word; write ({given!r},)")
        if not isinstance(given, Collection) or not all(isinstance(word, str) for word in given):
            raise SettingsError(f"{name}={given!r} must be a collection of names")


def _check_sizes(rule: Rule) -> None:
    for name in ("max_body", "max_response"):
        most = getattr(rule, name)
        if not _is_int(most) or most < 0:
            raise SettingsError(f"{name}={most!r} must be a number of bytes")
    if not (rule.fingerprint in ("bytes", "json", None) or callable(rule.fingerprint)):
        raise SettingsError(
            f"fingerprint={rule.fingerprint!r} is unknown; give 'bytes', 'json', None, or a "
            "function of the request and its body"
        )


def _is_int(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _linger(given: Any) -> float:
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if type(seconds) in (int, float) and 0 <= seconds < float("inf"):
        return float(seconds)
    raise SettingsError(f"linger={given!r} is not a duration; give seconds or a timedelta")


def _one_of(name: str, given: object, choices: tuple[str, ...]) -> None:
    if given not in choices:
        named = ", ".join(repr(choice) for choice in choices)
        raise SettingsError(f"{name}={given!r} is unknown; choose one of {named}")


def _scope(scope: Any) -> Scope:
    if callable(scope):
        return cast("Scope", scope)
    if isinstance(scope, str) and scope:
        keys.check_name("tenant", scope)
        return scope
    raise SettingsError(
        "scope= says whose key it is: a function of the request that gives the tenant or the "
        "signed-in user, or the name of the only tenant there is. Without it one customer could "
        "be shown another's response"
    )


# --- which rule for which request ---------------------------------------------------------------

_PLACE = re.compile(r"\{([^{}/]+)\}")


class Route:
    """A path such as "/orders/{id}/pay", with `{name}` for one part and `*` for all the rest."""

    def __init__(self, path: str) -> None:
        if not path.startswith("/"):
            raise SettingsError(f"routes has {path!r}, which is no path; begin it with a slash")
        # Text and names alternate. A converter, as in `{id:int}`, is ignored.
        text = _PLACE.split(path.removesuffix("*"))
        self._names = [name.partition(":")[0] for name in text[1::2]]
        rest = ".*" if path.endswith("*") else ""
        pattern = "([^/]+)".join(map(re.escape, text[::2])) + rest
        self.fits = re.compile(pattern, re.DOTALL).fullmatch

    def __call__(self, path: str) -> dict[str, str]:
        """Return the value of each name in the path; empty if the path does not match."""
        found = self.fits(path)
        return dict(zip(self._names, found.groups(), strict=True)) if found else {}


class Rules:
    """The rule for a method and a path: the first route that fits, else the rule for all.

    None instead of a rule lets the requests of its route pass untouched.
    """

    def __init__(
        self, rule: Rule | None, scope: Scope, routes: Mapping[str, Rule | None] | None = None
    ) -> None:
        self.common = Ruling(as_rule(rule), scope)
        self._routes: list[tuple[Route, Ruling | None]] = []
        if routes is not None and not isinstance(routes, Mapping):
            raise SettingsError(f"routes={routes!r:.80}: give a dict, {{path: Rule(...)}}")
        for path, chosen in (routes or {}).items():
            route, ruling = Route(path), None
            if chosen is not None:
                ruling = Ruling(as_rule(chosen, f"routes[{path!r}]"), scope, route)
            self._routes.append((route, ruling))

    def find(self, method: str, path: str) -> Ruling | None:
        """What holds for this request; None when nothing does."""
        ruling: Ruling | None = self.common
        for route, chosen in self._routes:
            if route.fits(path):
                ruling = chosen
                break
        # Browsers send `patch` as it is written, and most frameworks take it for PATCH.
        if ruling is None or method.upper() not in ruling.methods:
            return None
        return ruling
