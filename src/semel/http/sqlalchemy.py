"""Idempotency in a handler of your own, step by step, on its SQLAlchemy session.

    idempotency = SqlAlchemyIdempotency(session, tenant_id=tenant)
    await idempotency.lock(
        idempotency_key=key, operation="CreateOrder", request_hash=hash_request(command)
    )
    try:
        order = await place(command)
        await idempotency.store_response(
            idempotency_key=key, response=order.to_dict(), status_code=201
        )
        await session.commit()                       # rows and response, or neither
    except Exception:
        await idempotency.mark_failed(key)           # rows gone, key free
        raise

These are other names for the verbs of the ledger: `lock` claims, on a connection of the store's
own, so that others see it at once; `store_response` completes inside the session; `mark_failed`
rolls the session back and then releases. With a sync `Session` the same methods return their
values.

What is easy to get wrong is to commit in between: after a crash, rows without a response are
written again. So from `lock` to `store_response` the session refuses to be committed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import sys
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NoReturn,
    Protocol,
    TypeAlias,
    TypeVar,
    overload,
)

try:
    import sqlalchemy as sa
    from sqlalchemy import event, orm
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session
except ImportError as error:  # pragma: no cover - every test environment has it
    from semel.errors import SettingsError

    raise SettingsError(f"{error.name} is not installed: pip install 'semel[sql]'") from error

from semel import keys
from semel.call import Call, Raised, summary, unwrap
from semel.colour import ASYNC, SYNC, Colour, run
from semel.errors import IdempotencyConflictError, SettingsError, StoreUnavailableError
from semel.http.refusal import is_refusal
from semel.imports import importing
from semel.keys.digest import LIMIT
from semel.policy import MIB, Policy, Seconds, make_policy
from semel.ports import StoreLedger
from semel.stores.sql import SQLStore
from semel.stores.sql.bound import codec_of, refuse_autocommit
from semel.stores.sql.committing import Watch, the_session
from semel.stores.sql.rows import KEY_CHARS, TENANT_CHARS, original_text, shortened
from semel.values import Done, Key, Mismatch, Outcome, Record, State

__all__ = [
    "IdempotencyConflictError",
    "IdempotencyRecord",
    "IdempotencyStore",
    "SqlAlchemyIdempotency",
    "hash_request",
]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__)

log = logging.getLogger("semel")

# Apart from guards and from the doors: a request that has passed a door may lock here as well.
NAMESPACE = "handler"

# How long a handler may hold a key. One that hangs is taken over when its last lease has ended.
MAX_RUN_S = 3600

SWEPT_AT_ONCE = 10_000


# --- the record, as rows of the ORM -------------------------------------------------------------


class _Told(sa.types.TypeDecorator[str]):
    """Text as it was given; the table has it with escapes."""

    impl = sa.Text
    cache_ok = True

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        return None if value is None else shortened(value, self.most, codec_of(dialect))

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> str | None:
        return None if value is None else original_text(value)


class _Moment(sa.types.TypeDecorator[datetime]):
    """An aware time in UTC; MariaDB and SQLite keep it without its zone."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None or dialect.name == "postgresql":
            return value
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class _Tables(orm.DeclarativeBase):
    """Apart from your own metadata: nobody creates or drops these tables by accident."""


class IdempotencyRecord(_Tables):
    """A row of table `idempotency`, to be selected; only the ledger writes it.

    `response` is what `store_response` was given. What takes more than 64 KiB, or has a character
    that the database's encoding lacks, is in `body` instead, as JSON.
    """

    __tablename__ = "idempotency"

    id: orm.Mapped[bytes] = orm.mapped_column(sa.LargeBinary, primary_key=True)
    idempotency_key: orm.Mapped[str] = orm.mapped_column(_Told(KEY_CHARS))
    tenant_id: orm.Mapped[str] = orm.mapped_column(_Told(TENANT_CHARS))
    operation: orm.Mapped[str] = orm.mapped_column(_Told(sys.maxsize))
    request_hash: orm.Mapped[str]
    response: orm.Mapped[Any] = orm.mapped_column(sa.JSON, nullable=True)
    body: orm.Mapped[bytes | None] = orm.mapped_column(sa.LargeBinary)
    status_code: orm.Mapped[int | None]
    state: orm.Mapped[str]
    error: orm.Mapped[str | None] = orm.mapped_column(_Told(sys.maxsize))
    created_at: orm.Mapped[datetime] = orm.mapped_column(_Moment)
    completed_at: orm.Mapped[datetime | None] = orm.mapped_column(_Moment)
    expires_at: orm.Mapped[datetime | None] = orm.mapped_column(_Moment)

    def __repr__(self) -> str:
        return f"IdempotencyRecord({self.idempotency_key!r}, {self.state})"


@event.listens_for(IdempotencyRecord, "before_insert")
@event.listens_for(IdempotencyRecord, "before_update")
@event.listens_for(IdempotencyRecord, "before_delete")
def _refuse_to_write(*_: Any) -> NoReturn:
    raise SettingsError(
        "IdempotencyRecord is for reading: what it says is decided by fence and lease. Use lock, "
        "store_response and mark_failed, or `semel ledger` to settle a record by hand"
    )


def _shown(key: Key, outcome: Outcome, **more: Any) -> IdempotencyRecord:
    """What was recorded, as it was given, wherever the table keeps it."""
    return IdempotencyRecord(
        id=key.id,
        idempotency_key=key.text,
        tenant_id=key.tenant,
        operation=key.operation,
        response=json.loads(outcome.data),
        status_code=outcome.status,
        state=State.COMPLETED.value,
        **more,
    )


# --- the request --------------------------------------------------------------------------------


def hash_request(command: Any) -> str:
    """A hash of what was asked, the same for equal commands: models, dataclasses, dicts, values."""
    asked = keys.canonical(
        command, where="hash_request(command)", remedy="give a request_hash of your own"
    )
    return keys.fingerprint(asked).hex()


def _fingerprint(request_hash: str | None) -> bytes:
    """A hash in hex as it is, so that the table shows it; any other text by its own hash."""
    if request_hash is None:
        return b""
    text = keys.plain("request_hash", request_hash)
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    return data if data.hex() == text and text else keys.fingerprint(text.encode(errors="replace"))


def _fitting(text: str) -> str:
    """A client's key of any length: a long one by its hash, since what it means is up to them."""
    data = text.encode("utf-8", "surrogatepass")
    return text if len(data) <= LIMIT else f"sha256:{hashlib.sha256(data).hexdigest()}"


def _encoded(response: Any) -> bytes:
    """Plain JSON: what is replayed goes out through the same JSON as the first answer did."""
    if hasattr(response, "model_dump"):
        response = response.model_dump(mode="json")
    try:
        text = json.dumps(
            response,
            ensure_ascii=False,
            allow_nan=False,
            check_circular=True,
            separators=(",", ":"),
        )
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingsError(
            f"store_response: {error}; give what JSON can say (dict, list, str, numbers, bool, "
            'None), such as model_dump(mode="json") of a pydantic model'
        ) from error


# --- what is locked -----------------------------------------------------------------------------


class _Handling(Call):
    """The call behind one locked key.

    It never holds the session, which may end without a word: then nobody renews any more.
    """

    busy_advice = "Retry later"
    lost_error = "ResultLostError"
    session: weakref.ref[orm.Session]
    answered = False
    """May the session be committed, as far as this key is concerned?"""
    within: weakref.ref[orm.SessionTransaction] | None = None
    """The savepoint, or the whole transaction, that the response stands or falls with."""

    async def _renew(self) -> None:
        if self.session() is None:
            self.let_go()
        else:
            await super()._renew()

    async def answer(self, bound: StoreLedger, outcome: Outcome) -> None:
        """Complete inside the session, or raise: then the session's rows are gone already."""
        own, self._ledger = self._ledger, bound
        try:
            settled = await self.succeed(outcome)
        finally:
            self._ledger = own
        if settled is not outcome:  # somebody took over, or it cannot be written
            self.answered = True
            raise settled.error if isinstance(settled, Raised) else self.duplicate_error(settled)
        self.stands_with(_innermost(self.session()))

    def stands_with(self, transaction: orm.SessionTransaction | None) -> None:
        """The response is written in this transaction, or in a savepoint of it."""
        self.answered = transaction is not None
        self.within = None if transaction is None else weakref.ref(transaction)

    def is_within(self, transaction: orm.SessionTransaction | None) -> bool:
        return self.within is not None and self.within() is transaction

    async def give_back(self, bound: StoreLedger, error: BaseException | None) -> None:
        """Release, unless it has happened. What cannot be released ends with its lease."""
        why = "marked as failed" if error is None else summary(error)
        try:
            await bound.release(self._claimed(), error=why)
        except StoreUnavailableError as trouble:
            log.warning("semel: %r could not be released: %s", self.key.text, trouble)
        finally:
            self.let_go()

    def _conflict(self, answer: Mismatch) -> IdempotencyConflictError:
        return _conflict(self.key, answer.what)

    def _outcome(self, value: Outcome) -> Outcome:
        most = self.policy.max_result
        if len(value.data) <= most:
            return value
        lost = self._lost(f"its response takes {len(value.data)} bytes, more than {most}")
        return Outcome("lost", lost.data, value.status)

    def replay(self, outcome: Outcome) -> Any:
        return super().replay(outcome) if outcome.kind != "value" else _shown(self.key, outcome)


class _Locks(Watch):
    """The keys that are locked through one session, which is not to be committed without them."""

    name = "semel.held"
    refusal = (
        "this session holds a locked idempotency key whose response is not stored yet: rows that "
        "are committed without it would be written again by a retry. Call store_response first, "
        "or mark_failed. A savepoint (session.begin_nested()) is fine"
    )
    _known = False
    """Is it known how the session's transaction ended?"""

    def __init__(self, session: orm.Session) -> None:
        self.calls: dict[bytes, _Handling] = {}
        super().__init__(session)

    @property
    def on(self) -> bool:
        return not all(call.answered for call in self.calls.values())

    def add(self, call: _Handling) -> None:
        # What ended with an earlier transaction of a session that is used again.
        self.calls = {id: call for id, call in self.calls.items() if not call.answered}
        self.calls[call.key.id] = call

    def listeners(self) -> dict[str, Callable[..., None]]:
        return {
            **super().listeners(),
            "after_rollback": self._rolled_back,
            "after_commit": self._committed,
        }

    @property
    def carries(self) -> bool:
        return any(call.answered for call in self.calls.values())

    def _rolled_back(self, session: orm.Session) -> None:
        self._known = session.get_nested_transaction() is None

    def _committed(self, session: orm.Session) -> None:
        savepoint = session.get_nested_transaction()
        if savepoint is None:
            self._known = True
            self.calls.clear()
        else:
            self._move(savepoint, savepoint.parent)

    def _move(self, ended: orm.SessionTransaction, to: orm.SessionTransaction | None) -> None:
        """What was written in a savepoint goes with what is around it, or is not there any more."""
        for call in self.calls.values():
            if call.is_within(ended):
                call.stands_with(to)

    def _over(self, session: orm.Session, transaction: Any) -> None:
        super()._over(session, transaction)
        self._move(transaction, None)
        if transaction.parent is not None:
            return
        if not self._known:
            self._closed()
        self._known = False

    def _closed(self) -> None:
        """Neither committed nor rolled back: whoever had the session has left."""
        for call in self.calls.values():
            call.let_go()
            call.answered = True


def _innermost(session: orm.Session | None) -> orm.SessionTransaction | None:
    if session is None:
        return None
    return session.get_nested_transaction() or session.get_transaction()


# --- step by step -------------------------------------------------------------------------------


class IdempotencyStore(Protocol):
    """What an async handler needs."""

    def get_response(self, key: str) -> Awaitable[IdempotencyRecord | None]:
        """What was answered before, or None."""
        ...

    def lock(
        self, *, idempotency_key: str, operation: str, request_hash: str | None = None
    ) -> Awaitable[None]:
        """Hold the key, or raise who else does."""
        ...

    def store_response(
        self, *, idempotency_key: str, response: Any, status_code: int = 200
    ) -> Awaitable[None]:
        """Put the response into the session's transaction."""
        ...

    def mark_failed(self, key: str) -> Awaitable[None]:
        """Take the rows back and free the key."""
        ...

    def cleanup_expired(self) -> Awaitable[int]:
        """Delete what has expired."""
        ...


S = TypeVar(
    "S", bound="orm.Session | orm.scoped_session[Any] | AsyncSession | async_scoped_session[Any]"
)
T = TypeVar("T")

Awaited: TypeAlias = (
    "SqlAlchemyIdempotency[AsyncSession] | SqlAlchemyIdempotency[async_scoped_session[Any]]"
)
Direct: TypeAlias = (
    "SqlAlchemyIdempotency[orm.Session] | SqlAlchemyIdempotency[orm.scoped_session[Any]]"
)


@functools.lru_cache(maxsize=64)
def _policy(ttl: Seconds, lease: Seconds | None) -> Policy:
    return make_policy(
        ttl=ttl,
        lease=lease,
        wait_timeout=30,
        max_run=MAX_RUN_S,
        max_waiters=64,
        max_result=MIB,
        on_duplicate="raise",
        on_failure="unlock",
        on_crash="retry",
        on_unavailable="raise",
        codec=None,
        require=(),
    )


class _OnlyTenant(str):
    """Type of the default of `tenant_id`, which is empty.

    It tells the default from an empty name that the caller gives, which is refused.
    """

    __slots__ = ()


_ONLY_TENANT = _OnlyTenant()


class SqlAlchemyIdempotency(Generic[S]):
    """Locks keys, and stores the responses to them in the session's own transaction.

    With an `AsyncSession` every method is awaited, with a `Session` it returns its value. Keys of
    different tenants never meet. Without `store`, records are in the session's own database, on
    connections of its engine: its pool needs one more than there are requests at a time.
    """

    def __init__(
        self,
        session: S,
        *,
        tenant_id: str = _ONLY_TENANT,
        store: SQLStore | None = None,
        ttl: Seconds = 86_400,
        lease: Seconds | None = None,
    ) -> None:
        given = the_session(session)
        self._session = given
        self._sync = given.sync_session if isinstance(given, AsyncSession) else given
        self._colour: Colour = ASYNC if isinstance(given, AsyncSession) else SYNC
        self._store = _default_store(self._sync, self._colour) if store is None else store
        if tenant_id is not _ONLY_TENANT and is_refusal(tenant_id):
            raise SettingsError(
                f"tenant_id={tenant_id!r} names no tenant; refuse the request, or leave tenant_id "
                "out where there is only one"
            )
        self._tenant = "" if tenant_id is _ONLY_TENANT else tenant_id
        keys.check_name("tenant", self._tenant)
        self._policy = _policy(ttl, lease)
        if not isinstance(self._store, SQLStore):
            raise SettingsError(
                f"store={store!r} cannot share the session's transaction; give SQLStore(engine) "
                "over the session's own database"
            )

    # --- get_response -------------------------------------------------------------------------

    @overload
    def get_response(
        self: Awaited,
        key: str,
        *,
        operation: str | None = None,
        request_hash: str | None = None,
    ) -> Coroutine[Any, Any, IdempotencyRecord | None]: ...

    @overload
    def get_response(
        self: Direct,
        key: str,
        *,
        operation: str | None = None,
        request_hash: str | None = None,
    ) -> IdempotencyRecord | None: ...

    def get_response(
        self, key: str, *, operation: str | None = None, request_hash: str | None = None
    ) -> Any:
        """What was answered before, with `response` and `status_code`; None if nothing was.

        Give `operation` and `request_hash` too: without them, whoever repeats a key with another
        request is answered with the response to the first, and `lock` is never asked.
        """
        return self._go(self._get(key, operation, request_hash))

    async def _get(
        self, text: str, operation: str | None, request_hash: str | None
    ) -> IdempotencyRecord | None:
        key = self._key(text)
        record = await self._store.ledger(self._colour).look(key.id)
        if record is None or record.state is not State.COMPLETED or record.outcome is None:
            return None
        if operation is not None and record.key.operation != operation:
            raise _conflict(key, "operation")
        if request_hash is not None and record.fingerprint != _fingerprint(request_hash):
            raise _conflict(key, "fingerprint")
        if record.outcome.kind != "value":
            unwrap(self._call(key, b"").replay(record.outcome))
        return _shown_record(record)

    # --- lock ---------------------------------------------------------------------------------

    @overload
    def lock(
        self: Awaited,
        *,
        idempotency_key: str,
        operation: str,
        request_hash: str | None = None,
    ) -> Coroutine[Any, Any, None]: ...

    @overload
    def lock(
        self: Direct,
        *,
        idempotency_key: str,
        operation: str,
        request_hash: str | None = None,
    ) -> None: ...

    def lock(self, *, idempotency_key: str, operation: str, request_hash: str | None = None) -> Any:
        """Hold the key, for as long as the handler runs and the session is open.

        `InProgressError` when another request holds it, `DuplicateExecutionError` when it was
        answered meanwhile (its `result` is what `get_response` gives), `IdempotencyConflictError`
        when the key was used for another operation or request. A key that failed, or whose holder
        has died, is taken over.
        """
        return self._go(self._lock(self._key(idempotency_key, operation), request_hash))

    async def _lock(self, key: Key, request_hash: str | None) -> None:
        refuse_autocommit(self._sync.get_bind())
        call = self._call(key, _fingerprint(request_hash))
        answer = await call.ask()
        if isinstance(answer, Done):
            raise call.duplicate_error(unwrap(call.replay(answer.outcome)))
        try:
            call.begin(answer)
            _Locks.of(self._sync).add(call)
        except BaseException:
            call.let_go()
            raise

    # --- store_response -----------------------------------------------------------------------

    @overload
    def store_response(
        self: Awaited,
        *,
        idempotency_key: str,
        response: Any,
        status_code: int = 200,
    ) -> Coroutine[Any, Any, None]: ...

    @overload
    def store_response(
        self: Direct,
        *,
        idempotency_key: str,
        response: Any,
        status_code: int = 200,
    ) -> None: ...

    def store_response(self, *, idempotency_key: str, response: Any, status_code: int = 200) -> Any:
        """Put the response into the session's transaction: commit it, and both are there.

        `response` is anything that JSON can say. When the key was lost meanwhile, to somebody who
        took a silent holder for dead, the session is rolled back and that is raised.
        """
        return self._go(self._answer(self._key(idempotency_key), response, status_code))

    async def _answer(self, key: Key, response: Any, status_code: int) -> None:
        call = _Locks.of(self._sync).calls.get(key.id)
        if call is None:
            raise SettingsError(
                f"{key.text!r} is not locked in this session; call lock first, and store its "
                "response before the session is committed or closed"
            )
        await call.answer(self._bound(), Outcome("value", _encoded(response), status_code))

    # --- mark_failed --------------------------------------------------------------------------

    @overload
    def mark_failed(
        self: Awaited,
        key: str,
    ) -> Coroutine[Any, Any, None]: ...

    @overload
    def mark_failed(
        self: Direct,
        key: str,
    ) -> None: ...

    def mark_failed(self, key: str) -> Any:
        """Roll the session back, then free the key: a following commit has nothing to commit.

        The error being handled goes into the record. When the transaction was committed after all
        (its answer was lost), the record says so and stays; a key that is not locked in this
        session is left alone.
        """
        return self._go(self._mark_failed(self._key(key), sys.exception()))

    async def _mark_failed(self, key: Key, error: BaseException | None) -> None:
        call = _Locks.of(self._sync).calls.pop(key.id, None)
        work = self._roll_back() if call is None else call.give_back(self._bound(), error)
        await self._colour.shield(work)

    # --- cleanup_expired ----------------------------------------------------------------------

    @overload
    def cleanup_expired(
        self: Awaited,
    ) -> Coroutine[Any, Any, int]: ...

    @overload
    def cleanup_expired(
        self: Direct,
    ) -> int: ...

    def cleanup_expired(self) -> Any:
        """Delete what has expired, of every tenant, and say how many; never a live lease."""
        return self._go(self._clean())

    async def _clean(self) -> int:
        ledger, swept = self._store.ledger(self._colour), 0
        while found := await ledger.sweep(SWEPT_AT_ONCE):
            swept += found
        return swept

    # --- both colours -------------------------------------------------------------------------

    def _go(self, flow: Coroutine[Any, Any, T]) -> Any:
        return run(flow) if self._colour.name == "sync" else flow

    def _key(self, text: str, operation: str = "") -> Key:
        return keys.make_key(
            _fitting(text), tenant=self._tenant, operation=operation, version=NAMESPACE
        )

    def _call(self, key: Key, fingerprint: bytes) -> _Handling:
        ledger = self._store.ledger(self._colour)
        call = _Handling(self._policy, ledger, self._colour, key, fingerprint)
        call.session = weakref.ref(self._sync)
        return call

    def _bound(self) -> StoreLedger:
        return self._store.bind(self._session).ledger(self._colour)

    async def _roll_back(self) -> None:
        rolled_back = self._session.rollback()
        if rolled_back is not None:
            await rolled_back


def _shown_record(record: Record) -> IdempotencyRecord:
    assert record.outcome is not None
    return _shown(
        record.key,
        record.outcome,
        request_hash=record.fingerprint.hex(),
        created_at=record.created_at,
        completed_at=record.completed_at,
        expires_at=record.expires_at,
    )


def _conflict(key: Key, what: Literal["operation", "fingerprint"]) -> IdempotencyConflictError:
    other, advice = "operation", "Use a new key for a new effect"
    if what == "fingerprint":
        other = "request"
        advice += ", or leave out of request_hash= what may differ between repeats"
    return IdempotencyConflictError(
        f"{key.text!r} was used before for another {other}; nothing was run. {advice}",
        key=key.text,
    )


# --- the store of an engine ---------------------------------------------------------------------


def _default_store(session: orm.Session, colour: Colour) -> SQLStore:
    """The store over the session's own engine: one for each, and gone with it."""
    bind = session.get_bind()
    engine = bind.engine
    store: SQLStore | None = getattr(engine, STORE, None)
    if store is None:
        _refuse_memory(engine)
        store = SQLStore(AsyncEngine(engine) if colour.name == "async" else engine)
        setattr(engine, STORE, store)
    return store


STORE = "_semel_store"


def _refuse_memory(engine: sa.Engine) -> None:
    url = engine.url
    if engine.dialect.name == "sqlite" and url.database in {None, "", ":memory:"}:
        raise SettingsError(
            "the session's SQLite database is in memory and belongs to one connection, but a lock "
            "must be seen while the session has not committed yet; use a file (sqlite:///path.db)"
        )
