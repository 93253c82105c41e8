"""The guard: a function, a method or a block whose effect happens once.

The decorator turns a call's arguments into a key and a fingerprint; `call` does the rest.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast, overload
from uuid import UUID
from weakref import WeakSet

from semel import keys
from semel.attempt import CURRENT, Attempt, current, leave
from semel.call import Call, Raised, Unguarded, unwrap
from semel.codec import Codec
from semel.colour import ASYNC, SYNC, Colour, away_from, from_away, run
from semel.errors import SettingsError, StoreUnavailableError
from semel.policy import (
    MIB,
    CannotTell,
    OnCrash,
    OnDuplicate,
    OnFailure,
    OnUnavailable,
    Policy,
    Recovered,
    Retry,
    Seconds,
    make_policy,
)
from semel.ports import Store, StoreLedger
from semel.settings import as_store, default_store
from semel.values import Done, Key, Survives

__all__ = [
    "Attempt",
    "CannotTell",
    "Guarded",
    "Recovered",
    "Retry",
    "current",
    "idempotent",
    "once",
    "step",
]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")
C = TypeVar("C")

log = logging.getLogger("semel")

CHOOSE = "choose what to compare with fingerprint= (a function of the arguments, or None)"


def step(name: str, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
    """A recovery point inside a guarded body: done once, replayed after a takeover.

    In an async function, await it; `fn` may be sync or async there. Sync code in a worker thread
    below it, such as a `def` endpoint of FastAPI, calls it without await. A step is known by its
    name, so give each its own. When the process dies between the step's effect and its record,
    the step runs again: hand `current().child_key(name)` to the receiver.
    """
    if not callable(fn):
        raise SettingsError(
            f"step({name!r}, {fn!r}): give its name and then what to do, as in "
            'step("charge", bank.charge, order)'
        )
    call = current().call
    name = keys.plain("step's name", name)
    if away_from(call.home):
        return cast("R", _step_away(call, name, functools.partial(fn, *args, **kwargs)))
    flow = call.step(name, fn, args, kwargs)
    if call.colour is ASYNC:
        return cast("R", _unwrapped(flow))
    return cast("R", unwrap(run(flow)))


def _step_away(call: Call, name: str, work: Callable[[], Any]) -> Any:
    """A step of sync code in a worker thread, below an async call: no await, and the loop is free.

    The work stays in a worker thread too; only its record is written by the loop.
    """
    assert call.home is not None

    async def in_thread() -> Any:
        value = unwrap(await asyncio.to_thread(_carried, work))
        return await value if inspect.isawaitable(value) else value

    return unwrap(from_away(call.home, call.step(name, in_thread, (), {})))


def _carried(work: Callable[[], Any]) -> Any:
    """A future cannot carry a StopIteration: whoever waits for it would wait for ever."""
    try:
        return work()
    except StopIteration as error:
        return Raised(error)


async def _unwrapped(flow: Any) -> Any:
    return unwrap(await flow)


# --- the decorator ------------------------------------------------------------------------------


class Guarded(Protocol[P, R_co]):
    """A guarded function: called like the original, with its record at hand."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __get__(self, obj: None, owner: type | None = None) -> Guarded[P, R_co]: ...

    @overload
    def __get__(
        self: Guarded[Concatenate[S, Q], R_co], obj: S, owner: type | None = None
    ) -> Callable[Q, R_co]: ...

    def __get__(self, obj: Any, owner: type | None = None) -> Any: ...

    def key_for(self, *args: P.args, **kwargs: P.kwargs) -> Key:
        """The key a call with these arguments has."""
        ...

    def forget(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Delete that call's record (await it if the function is async); False if none."""
        ...


class Decorator(Protocol):
    """What `idempotent(...)` gives: it takes a function, or a command-handler class."""

    @overload  # a class is callable too, but stays a class
    def __call__(self, target: type[C], /) -> type[C]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, target: Callable[P, R], /) -> Guarded[P, R]: ...

    def __call__(self, target: Any, /) -> Any: ...


KeySetting = str | Callable[..., str | bytes] | None
FingerprintSetting = Literal["arguments"] | Callable[..., Any] | None
ScopeSetting = str | Callable[..., str] | None


@overload
def idempotent(target: type[C], /) -> type[C]: ...  # type: ignore[overload-overlap]


@overload
def idempotent(target: Callable[P, R], /) -> Guarded[P, R]: ...


@overload
def idempotent(
    *,
    ttl: Seconds | None = 86_400,
    key: KeySetting = None,
    on_duplicate: OnDuplicate = "return",
    on_failure: OnFailure = "unlock",
    on_crash: OnCrash = "retry",
    on_unavailable: OnUnavailable = "raise",
    lease: Seconds | None = None,
    wait_timeout: Seconds = 30,
    max_run: Seconds = 3600,
    max_waiters: int = 64,
    max_result: int = MIB,
    store: Store | str | None = None,
    scope: ScopeSetting = None,
    version: str = "",
    require: str | Iterable[str] = (),
    fingerprint: FingerprintSetting = "arguments",
    operation: str | None = None,
    per_operation: bool = False,
    key_required: bool = False,
    codec: Codec | None = None,
) -> Decorator: ...


def idempotent(
    target: Any = None,
    /,
    *,
    ttl: Seconds | None = 86_400,
    key: KeySetting = None,
    on_duplicate: OnDuplicate = "return",
    on_failure: OnFailure = "unlock",
    on_crash: OnCrash = "retry",
    on_unavailable: OnUnavailable = "raise",
    lease: Seconds | None = None,
    wait_timeout: Seconds = 30,
    max_run: Seconds = 3600,
    max_waiters: int = 64,
    max_result: int = MIB,
    store: Store | str | None = None,
    scope: ScopeSetting = None,
    version: str = "",
    require: str | Iterable[str] = (),
    fingerprint: FingerprintSetting = "arguments",
    operation: str | None = None,
    per_operation: bool = False,
    key_required: bool = False,
    codec: Codec | None = None,
) -> Any:
    """Guard a function so that its effect happens once per key.

    `key`: None for all the arguments, a template such as "invoice:{user_id}", or a function of
    the arguments. With a key of your own the arguments are compared: the same key with other
    arguments is refused (`fingerprint=None` turns that off, a function chooses what to compare).
    `scope` is the tenant, or a function of the arguments that gives it.

    `on_duplicate`: "return" the recorded result, "raise", or "wait" for a running call.
    `on_failure`: "unlock" lets a failed call run again, "lock" records the error as the outcome.
    `on_crash`: "retry", "hold" until somebody resolves it, or a function that finds out.
    `on_unavailable`: "raise" when the store is down, or "run" unguarded.

    `ttl` is how long a result is remembered. `lease` is how long a holder that does not renew it
    keeps the key: 30 seconds, or `ttl` if that is shorter. A running call renews it, up to
    `max_run`.

    `key_required` is for a command-handler class: refuse a command without a key, instead of
    running it unguarded.
    """
    policy = make_policy(
        ttl=ttl,
        lease=lease,
        wait_timeout=wait_timeout,
        max_run=max_run,
        max_waiters=max_waiters,
        max_result=max_result,
        on_duplicate=on_duplicate,
        on_failure=on_failure,
        on_crash=on_crash,
        on_unavailable=on_unavailable,
        codec=codec,
        require=require,
    )
    opened = None if store is None else as_store(store)

    def decorate(target: Any) -> Any:
        if isinstance(target, type):
            command_key = functools.partial(_CommandKey, required=key_required)
            return _guard_handler(cast("type[Any]", target), key, command_key, decorate_with)
        if key_required:
            raise SettingsError(
                "key_required= is for a command-handler class; a function always has a key, from "
                "key= or from its arguments"
            )
        if isinstance(target, (staticmethod, classmethod)):
            method: Any = cast("object", target)
            return type(method)(decorate_with(method.__func__))
        return decorate_with(target)

    def decorate_with(fn: Callable[..., Any], key: Any = key) -> Any:
        return _Guard(
            fn,
            policy=policy,
            store=opened,
            key=key,
            scope=scope,
            fingerprint=fingerprint,
            operation=operation,
            per_operation=per_operation,
            version=version,
        ).wrap()

    return decorate if target is None else decorate(target)


def _guard_handler(
    cls: type[C],
    key: KeySetting,
    command_key: Callable[[str], _CommandKey],
    guard: Callable[..., Any],
) -> type[C]:
    """Guard a command handler's `handle`, by the key its command carries."""
    handle = cls.__dict__.get("handle") or getattr(cls, "handle", None)
    if not callable(handle):
        raise SettingsError(
            f"{cls.__qualname__} has no method handle(command); @idempotent on a class guards "
            "that method"
        )
    _, *parameters = inspect.signature(handle).parameters
    if not parameters:
        raise SettingsError(f"{cls.__qualname__}.handle must take the command as an argument")
    chosen = command_key(parameters[0]) if key is None else key
    cls.handle = guard(handle, chosen)  # type: ignore[attr-defined]
    return cls


class _NoCommandKeyError(SettingsError):
    """The command's `idempotency_key` is None, or it has no such attribute."""

    def __init__(self, text: str, command_key: _CommandKey, command: Any) -> None:
        super().__init__(text)
        self.command_key = command_key
        self.command = command


@dataclass(frozen=True, slots=True)
class _CommandKey:
    """Reads the key from the command's `idempotency_key`."""

    parameter: str
    required: bool

    def render(self, bound: dict[str, Any]) -> str | bytes:
        command = bound[self.parameter]
        key: Any = getattr(command, "idempotency_key", None)
        if key is None and isinstance(command, dict):
            key = cast("dict[str, Any]", command).get("idempotency_key")
        if key is None:
            text = (
                f"the command (parameter {self.parameter}) has no idempotency_key; set one on it, "
                "or give key="
            )
            raise SettingsError(text) if self.required else _NoCommandKeyError(text, self, command)
        return str(key) if isinstance(key, UUID) else cast("str | bytes", key)


class _Guard:
    """One guarded function: how a call becomes a key, and which flow runs it."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        policy: Policy,
        store: Store | None,
        key: Any,
        scope: ScopeSetting,
        fingerprint: FingerprintSetting,
        operation: str | None,
        per_operation: bool,
        version: str,
    ) -> None:
        _refuse_generators(fn)
        _refuse_settings(scope, fingerprint, version)
        if operation == "":
            raise SettingsError("operation='' is empty; leave it out, or give the effect a name")
        self._fn = fn
        self._policy = policy
        self._store = store
        self._scope = scope
        self._fingerprint = fingerprint
        self._per_operation = per_operation
        self._version = version
        self._colour = ASYNC if _is_async(fn) else SYNC
        named = keys.operation_of(fn) if operation is None else operation
        self._operation = keys.plain("operation", named)
        self._binder = keys.Binder(fn)
        self._key = self._key_setting(key, keys.short_name(fn) if operation is None else operation)
        self._compares = key is not None and fingerprint is not None
        self._warned: set[str] = set()
        self._asks = callable(self._key) or callable(scope) or callable(fingerprint)
        self._identify = self._identifier()
        self._required: WeakSet[StoreLedger] = WeakSet()
        if policy.recover is not None and self._colour is SYNC and _is_async(policy.recover):
            raise SettingsError("recover is async, but the guarded function is not")
        if store is not None:
            store.ledger(self._colour)  # refuses a store of the other colour, here and now

    def _key_setting(self, key: Any, name: str) -> Any:
        """Something with `render(bound arguments)`, or the user's own function."""
        if key is None and self._fingerprint not in ("arguments", None):
            raise SettingsError("fingerprint= needs key=; without a key, all arguments are the key")
        if key is None:
            return keys.AutoKey(self._operation, name)
        if isinstance(key, str):
            if not key:
                raise SettingsError("key='' is empty; write a template such as 'invoice:{user_id}'")
            return keys.Template(key, self._binder.names)
        if not callable(key) and not isinstance(key, _CommandKey):
            raise SettingsError(
                f"key={key!r} is neither a template such as 'invoice:{{user_id}}' nor a function"
            )
        return key

    # From arguments to key and fingerprint.

    def key_for(self, *args: Any, **kwargs: Any) -> Key:
        return self._identify(args, kwargs)[0]

    def _identifier(self) -> keys.Identify:
        if self._asks or isinstance(self._key, _CommandKey):
            return self._ask_identity
        return keys.identifier(
            self._binder,
            self._key,
            operation=self._operation,
            tenant=self._tenant((), {}),
            per_operation=self._per_operation,
            version=self._version,
            compares=self._compares,
            remedy=CHOOSE,
            leave_out=self._leave_out,
        )

    def _ask_identity(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Key, bytes]:
        """Through functions of the user's, which see the arguments as the guarded one does."""
        bound = self._binder.bind(args, kwargs)
        args, kwargs = self._binder.spread(bound, args, kwargs)
        if isinstance(self._key, keys.AutoKey):
            return self._key.key(bound, self._make_key(args, kwargs)), b""
        text: Any = self._key(*args, **kwargs) if callable(self._key) else self._key.render(bound)
        return self._make_key(args, kwargs)(text), self._fingerprint_of(bound, args, kwargs)

    def _make_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[str], Key]:
        return functools.partial(
            keys.make_key,
            tenant=self._tenant(args, kwargs),
            operation=self._operation,
            per_operation=self._per_operation,
            version=self._version,
        )

    def _tenant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if self._scope is None:
            return ""
        tenant: Any = self._scope(*args, **kwargs) if callable(self._scope) else self._scope
        if not isinstance(tenant, str) or not tenant:
            raise SettingsError(f"scope= gave {tenant!r}; a tenant is a str that is not empty")
        return tenant

    def _fingerprint_of(
        self, bound: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bytes:
        if not self._compares:
            return b""
        if callable(self._fingerprint):
            value = self._fingerprint(*args, **kwargs)
            return keys.fingerprint(
                keys.canonical(
                    value,
                    where="fingerprint",
                    remedy="give fingerprint= a value that can be compared",
                )
            )
        compared = bound
        if self._binder.self_name is not None:
            compared = {k: v for k, v in bound.items() if k != self._binder.self_name}
        return keys.fingerprint(
            keys.canonical_call(self._operation, compared, remedy=CHOOSE, leave_out=self._leave_out)
        )

    def _leave_out(self, parameter: str, error: SettingsError) -> None:
        """Log that a parameter is not compared; the key given by the caller identifies the call."""
        about = "a value is left out of the comparison, because the key identifies the call"
        self._warn_once(parameter, f"{about}: {error}")

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            log.warning("semel: %s", text)

    # Running.

    def wrap(self) -> Any:
        """A function like the original, in its colour."""
        guarded: Any = self._sync() if self._colour is SYNC else self._async()
        guarded.key_for = self.key_for
        guarded.forget = self.forget
        return guarded

    def _sync(self) -> Callable[..., Any]:
        @functools.wraps(self._fn)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return unwrap(run(self._flow(args, kwargs)))

        return guarded

    def _async(self) -> Callable[..., Any]:
        @functools.wraps(self._fn)
        async def guarded(*args: Any, **kwargs: Any) -> Any:
            return unwrap(await self._flow(args, kwargs))

        return guarded

    async def _flow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        identity = None
        try:
            identity = self._identify(args, kwargs)
        except _NoCommandKeyError as error:
            self._accept_no_key(error)
        if identity is None:  # outside of `except`, or errors of the body would name this one
            key = keys.make_key(secrets.token_hex(16), operation=self._operation)
            return await self._run_unguarded(key, args, kwargs)
        key, fingerprint = identity
        ledger = self._ledger()
        if self._policy.require:
            await self._check_requirements(ledger)
        call = Call(self._policy, ledger, self._colour, key, fingerprint)
        answer = None
        try:
            answer = await call.ask()
        except StoreUnavailableError as error:
            if self._policy.on_unavailable == "raise" or call.has_record(error):
                raise
            log.warning("semel: %r runs unguarded: %s", key.text, error)
        if answer is None:  # outside of `except`, or errors of the body would name the outage
            return await self._run_unguarded(key, args, kwargs)
        if isinstance(answer, Done):
            return call.duplicate(answer)
        return await call.perform(answer, lambda: self._fn(*args, **kwargs))

    async def _run_unguarded(self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Unguarded(self._policy, self._colour, key)
        return await call.go(lambda: self._fn(*args, **kwargs))

    def _accept_no_key(self, error: _NoCommandKeyError) -> None:
        """Log once that a command has no such attribute: its name may be misspelt."""
        if error.command_key is not self._key:  # of another guard, which a function called
            raise error
        command = error.command
        if isinstance(command, dict) or hasattr(command, "idempotency_key"):
            return
        self._warn_once(
            type(command).__qualname__,
            f"{self._operation} runs unguarded: {type(command)} has no attribute idempotency_key",
        )

    def _ledger(self) -> StoreLedger:
        store = self._store if self._store is not None else default_store()
        return store.ledger(self._colour)

    async def _check_requirements(self, ledger: StoreLedger) -> None:
        if ledger not in self._required:
            await require(ledger, self._policy.require, self._operation)
            self._required.add(ledger)

    def forget(self, *args: Any, **kwargs: Any) -> Any:
        flow = self._ledger().forget(self.key_for(*args, **kwargs).id)
        return flow if self._colour is ASYNC else run(flow)


async def require(ledger: StoreLedger, wanted: frozenset[Survives], who: str) -> None:
    """Refuse a store that is weaker than what was asked for."""
    found = await ledger.guarantees()
    missing = sorted(wanted - found.survives)
    if missing:
        raise SettingsError(
            f"{who} requires a store that survives {', '.join(missing)}; {found.store} does not: "
            + "; ".join(found.why)
        )


def _is_async(fn: Any) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
        getattr(fn, "__call__", None)  # noqa: B004
    )


def _refuse_settings(scope: Any, fingerprint: Any, version: Any) -> None:
    if not (scope is None or callable(scope) or (isinstance(scope, str) and scope)):
        raise SettingsError(f"scope={scope!r} is neither a tenant's name nor a function")
    if not (fingerprint in ("arguments", None) or callable(fingerprint)):
        raise SettingsError(
            f"fingerprint={fingerprint!r} is unknown; give 'arguments', None, or a function of "
            "the arguments that answers what to compare"
        )
    keys.make_key("any", version=version)


def _refuse_generators(fn: Any) -> None:
    if not callable(fn):
        raise SettingsError(f"@idempotent cannot guard {fn!r}; put it on a function or a class")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise SettingsError(
            f"{keys.operation_of(fn)} is a generator: what it yields cannot be recorded as one "
            "result. Return a list, or guard the work inside it with once() or step()"
        )


# --- the block ----------------------------------------------------------------------------------


class once:  # noqa: N801  (used like a function: `with once(key) as attempt:`)
    """A block that runs once per key.

        with once("invoice:7") as attempt:
            attempt.done(charge(...))

    Python cannot skip a block, so a duplicate raises `DuplicateExecutionError` (its `result` has
    what was recorded). With on_duplicate="return" or "wait" the block is entered on a replay
    too: ask `attempt.replayed` first, and read `attempt.result`. A block that never asked is
    told so with an error.
    """

    def __init__(
        self,
        key: str | bytes,
        *,
        store: Store | str | None = None,
        scope: str = "",
        operation: str = "once",
        fingerprint: Any = None,
        on_duplicate: OnDuplicate = "raise",
        on_failure: OnFailure = "unlock",
        on_crash: OnCrash = "retry",
        ttl: Seconds | None = 86_400,
        lease: Seconds | None = None,
        wait_timeout: Seconds = 30,
        max_run: Seconds = 3600,
        max_waiters: int = 64,
        max_result: int = MIB,
        require: str | Iterable[str] = (),
        per_operation: bool = False,
        version: str = "",
        codec: Codec | None = None,
    ) -> None:
        self._policy = make_policy(
            ttl=ttl,
            lease=lease,
            wait_timeout=wait_timeout,
            max_run=max_run,
            max_waiters=max_waiters,
            max_result=max_result,
            on_duplicate=on_duplicate,
            on_failure=on_failure,
            on_crash=on_crash,
            on_unavailable="raise",
            codec=codec,
            require=require,
        )
        self._store = None if store is None else as_store(store)
        self._key = keys.make_key(
            key, tenant=scope, operation=operation, per_operation=per_operation, version=version
        )
        self._fingerprint = (
            b""
            if fingerprint is None
            else keys.fingerprint(
                keys.canonical(
                    fingerprint,
                    where="fingerprint",
                    remedy="give fingerprint= a value that can be compared",
                )
            )
        )
        self._entered = False
        self._call: Call | None = None
        self._token: contextvars.Token[Attempt | None] | None = None
        self._attempt: Attempt | None = None

    # Both colours.

    async def _enter(self, colour: Colour) -> Attempt:
        if self._entered:
            raise SettingsError("a once() block is entered once; make a new one for each use")
        self._entered = True  # before anything is awaited: two tasks may have this very object
        try:
            return await self._begin(colour)
        except BaseException:
            self._reset()
            self._entered = False
            if self._call is not None:
                self._call.let_go()
            raise

    async def _begin(self, colour: Colour) -> Attempt:
        store = self._store if self._store is not None else default_store()
        ledger = store.ledger(colour)
        if self._policy.require:
            await require(ledger, self._policy.require, self._key.operation)
        self._call = call = Call(self._policy, ledger, colour, self._key, self._fingerprint)
        answer = await call.ask()
        if isinstance(answer, Done):
            return self._enter_replay(call, call.replay(answer.outcome))
        self._attempt = call.begin(answer)
        self._token = CURRENT.set(self._attempt)
        if answer.orphan is not None and self._policy.recover is not None:
            found = await call.recovered(answer.orphan)
            if found is not None:
                return await self._enter_recovered(call, found)
        return self._attempt

    def _enter_replay(self, call: Call, value: Any) -> Attempt:
        if self._policy.on_duplicate == "raise":
            raise call.duplicate_error(value)
        self._attempt = Attempt(self._key, None, call)
        self._attempt.done(unwrap(value))
        return self._attempt

    async def _enter_recovered(self, call: Call, found: Recovered) -> Attempt:
        self._reset()
        value = unwrap(await call.succeed(found.value))  # a winner's, if somebody took over
        return self._enter_replay(call, value)

    def _reset(self) -> None:
        if self._token is not None:
            leave(self._token)
            self._token = None

    async def _exit(self, error: BaseException | None) -> None:
        attempt, call = self._attempt, self._call
        assert attempt is not None
        assert call is not None
        self._reset()
        if attempt.claim is None:
            self._refuse_blind_replay(attempt, error)
        elif error is None:
            attempt.done(unwrap(await call.succeed(attempt.result)))
        elif isinstance(error, Exception):
            await call.fail(error)
        else:
            await call.interrupt(error)

    def _refuse_blind_replay(self, attempt: Attempt, error: BaseException | None) -> None:
        if error is None and not attempt.asked:
            raise SettingsError(
                f"the block for {attempt.key!r} ran although it was done before: it never asked "
                "`attempt.replayed`. Ask first, or leave on_duplicate at 'raise'"
            )

    def __enter__(self) -> Attempt:
        return run(self._enter(SYNC))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        run(self._exit(error))

    async def __aenter__(self) -> Attempt:
        return await self._enter(ASYNC)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._exit(error)
