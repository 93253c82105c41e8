"""The session's COMMIT as part of `complete`: one call, and record and rows are there, or neither.

    bound = store.bind(session, commit=True)
    ...                                              # the handler works with the session
    await bound.ledger(ASYNC).complete(claim, outcome)     # UPDATE by fence, then COMMIT

Who answers a request wants to know that its rows are there before the answer is sent. So while a
session is bound this way nobody else commits it (`Seal`), and an answer that is an error takes
the session's rows back before it is recorded on a connection of the store's own.

What is easy to get wrong is an error on COMMIT: it says nothing about whether the rows are there.
It is never sent again. The record went into the same transaction, so the record is asked: a
release by fence finds the claim still running (nothing has happened), or completed with our
outcome (it has). It cannot find it running while the transaction can still be committed: that one
holds the row's lock until it ends, and a release does not pass a lock.

`tests/faults/test_committing.py` cuts, kills and drops at each of these points.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy import event, exc, orm
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

from semel.colour import Colour, run
from semel.errors import SemelError, SettingsError, StoreUnavailableError
from semel.ports import StoreLedger
from semel.stores.rules import Completing
from semel.stores.sql.bound import (
    BoundLedger,
    BoundStore,
    Session,
    bound_link,
    fitting,
    recorded,
    refuse_autocommit,
    said,
)
from semel.stores.sql.endings import ends, refuse_lost, take_back, watch_losses
from semel.stores.sql.faults import Fault, elsewhere, fault_of
from semel.stores.sql.ledger import SQLLedger
from semel.stores.sql.links import Link
from semel.stores.sql.writing import begin_before_savepoints, carriers, joins, watch_writing
from semel.values import Answer, Claim, Kept, Key, Lost, Outcome, Terms, Verdict, Won

if TYPE_CHECKING:
    from semel.stores.sql import SQLStore

log = logging.getLogger("semel")

T = TypeVar("T")

# From here on a status is an error, and an error's rows are not kept.
FIRST_ERROR = 400

# How long to ask after a COMMIT without an answer. A server ends the transaction of a connection
# that was closed within milliseconds; one that restarts needs some seconds.
RESOLVE_WITHIN_S = 10.0
RESOLVE_PAUSE_S = 0.2

PASSING = (Fault.AGAIN, Fault.LOCKED, Fault.GONE)


# --- the session --------------------------------------------------------------------------------

OnSession: TypeAlias = Callable[[Callable[[orm.Session], T]], Awaitable[T]]
"""Runs a piece of work on the session, where the session lives."""


def _here(session: orm.Session) -> OnSession[Any]:
    async def go(work: Callable[[orm.Session], Any]) -> Any:
        return work(session)

    return go


def _in_a_thread(session: orm.Session) -> OnSession[Any]:
    """A sync session under an event loop: its driver blocks, so it must not do so in the loop."""

    async def go(work: Callable[[orm.Session], Any]) -> Any:
        return await asyncio.to_thread(work, session)

    return go


class Watch(ABC):
    """Keeps others from committing a session while it is `on`, and knows when they ended it.

    A session keeps its watch for life: to listen to a session costs more than to be asked.
    """

    name: ClassVar[str]
    """Where a session keeps it."""
    refusal: ClassVar[str]

    def __init__(self, session: orm.Session) -> None:
        self._ours = False
        self._watched: list[sa.Connection] = []
        self.ended = False
        """Was a transaction of the session ended since this was set to False?"""
        for name, listener in self.listeners().items():
            event.listen(session, name, listener)
        for connection in _connections(session):
            self._watch(connection)

    @classmethod
    def of(cls, session: orm.Session) -> Self:
        watch: Self | None = session.info.get(cls.name)
        if watch is None:
            watch = session.info[cls.name] = cls(session)
        return watch

    @property
    @abstractmethod
    def on(self) -> bool:
        """Is the session to be committed by nobody else now?"""

    @property
    def carries(self) -> bool:
        """Does the transaction that is being committed carry a response?"""
        return self._ours

    def listeners(self) -> dict[str, Callable[..., None]]:
        """Which events of the session it listens to."""
        return {
            "before_commit": self._refuse,
            "after_begin": self._connected,
            "after_transaction_end": self._over,
        }

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """For the one commit that is ours."""
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    def _refuse(self, session: orm.Session) -> None:
        # A savepoint that is released is no commit, and is told of as one.
        if session.get_nested_transaction() is None:
            self._refuse_foreign()

    def _refuse_foreign(self) -> None:
        if self.on and not self._ours:
            raise SettingsError(self.refusal)

    def _refuse_below(self, connection: sa.Connection) -> None:
        try:
            self._refuse_foreign()
        except SettingsError:
            take_back(connection)
            raise
        if self.carries:
            refuse_lost(connection)

    def _refuse_text(self, _: Any, __: Any, statement: str, *___: Any) -> None:
        if self.on and ends(statement):
            raise SettingsError(self.refusal)

    def _connected(self, _: orm.Session, transaction: Any, connection: sa.Connection) -> None:
        if transaction.parent is None:
            self._watch(connection)

    def _watch(self, connection: sa.Connection) -> None:
        """Below the session, where a commit past it is seen too."""
        if self.on:
            refuse_autocommit(connection)
        begin_before_savepoints(connection)
        watch_writing(connection)
        watch_losses(connection)
        for name, listener in self._below():
            event.listen(connection, name, listener)
        self._watched.append(connection)

    def _below(self) -> list[tuple[str, Callable[..., None]]]:
        return [("commit", self._refuse_below), ("before_cursor_execute", self._refuse_text)]

    def _leave(self) -> None:
        """A connection that outlives the session's transaction may see any number of sessions."""
        watched, self._watched = self._watched, []
        for connection in watched:
            if not connection.closed:
                for name, listener in self._below():
                    event.remove(connection, name, listener)

    def _over(self, _: orm.Session, transaction: Any) -> None:
        if transaction.parent is None:
            self.ended = True
            self._leave()


def _connections(session: orm.Session) -> set[sa.Connection]:
    return {connection for connection, *_ in joins(session)}


class _SealWatch(Watch):
    name = "semel.sealed"
    refusal = (
        "this session is committed together with the response, so it must not be committed "
        "before. Return instead: the commit is made together with the response. A savepoint "
        "(session.begin_nested()) is fine"
    )
    _seal: weakref.ref[Seal] | None = None

    @property
    def on(self) -> bool:
        return self._seal is not None and self._seal() is not None

    def put(self, seal: Seal) -> None:
        self._seal = weakref.ref(seal)
        self.ended = False

    def lift(self, seal: Seal) -> None:
        if self._seal is not None and self._seal() is seal:
            self._seal = None


class Seal:
    """While it is on, the session is committed by nobody but us; off when nobody has it any more.

    Made, it is on.
    """

    def __init__(self, session: orm.Session) -> None:
        self._session = weakref.ref(session)
        self._watch = _SealWatch.of(session)
        self.put()

    def put(self) -> None:
        self._watch.put(self)

    def lift(self) -> None:
        self._watch.lift(self)

    def open(self) -> contextlib.AbstractContextManager[None]:
        """For the one commit that is ours."""
        return self._watch.open()

    def carriers(self) -> Collection[sa.Connection]:
        session = self._session()
        return () if session is None else list(carriers(session))

    @property
    def ended(self) -> bool:
        """Was the session's transaction ended, and no other begun since?"""
        session = self._session()
        return session is None or (self._watch.ended and not session.in_transaction())


# --- the store ----------------------------------------------------------------------------------


class CommittingStore(BoundStore):
    """A store for one session, whose `complete` commits it.

    A sync session serves both colours: under an event loop its own work is done in a thread.
    """

    def __init__(self, store: SQLStore, session: Session) -> None:
        given = the_session(session)
        sync = given.sync_session if isinstance(given, AsyncSession) else given
        _refuse_autocommit_engine(sync)
        self._bound: orm.Session | AsyncSession = given
        self._store = store
        self._seal = Seal(sync)
        self._ledgers: dict[str, CommittingLedger] = {}

    def ledger(self, colour: Colour) -> StoreLedger:
        if isinstance(self._bound, AsyncSession) and colour.name == "sync":
            raise SettingsError(
                f"this store is bound to {type(self._bound).__name__}, which serves async code; "
                "bind it to a session of the sync colour"
            )
        if colour.name not in self._ledgers:
            own = cast("SQLLedger", self._store.ledger(colour))
            on_session = self._on_session(colour)
            self._ledgers[colour.name] = CommittingLedger(own, on_session, colour, self._seal)
        bound: Any = self._ledgers[colour.name]
        ledger: StoreLedger = bound
        return ledger

    def _on_session(self, colour: Colour) -> OnSession[Any]:
        if isinstance(self._bound, AsyncSession):
            return self._bound.run_sync
        return _here(self._bound) if colour.name == "sync" else _in_a_thread(self._bound)


def the_session(session: Session) -> orm.Session | AsyncSession:
    """The session itself, also behind a registry of them."""
    given: Any = session
    if isinstance(given, orm.scoped_session | async_scoped_session):
        given = given()
    if not isinstance(given, orm.Session | AsyncSession):
        raise SettingsError(
            f"bind(commit=True) got a {type(given).__name__}; give it the SQLAlchemy Session or "
            "AsyncSession that is to be committed together with the outcome"
        )
    return given


def _refuse_autocommit_engine(session: orm.Session) -> None:
    with contextlib.suppress(exc.UnboundExecutionError):
        refuse_autocommit(session.get_bind())


# --- the ledger ---------------------------------------------------------------------------------


class Stage(enum.Enum):
    """How far a `complete` has come on the session."""

    NOTHING = "the session was not touched yet"
    ROWS = "the session's own rows are being written"
    RECORD = "the outcome is being written"


class CommittingLedger(BoundLedger):
    """The store's own ledger, except that a claim ends together with the session."""

    _stage = Stage.NOTHING
    _sent: Completing | None = None
    """What went with a COMMIT: from then on only the record can tell whether it is there."""

    def __init__(
        self, ledger: SQLLedger, on_session: OnSession[Any], colour: Colour, seal: Seal
    ) -> None:
        self._ledger = ledger
        self._on_session = on_session
        self._colour = colour
        self._seal = seal

    # --- beginning ----------------------------------------------------------------------------

    async def claim(
        self, key: Key, *, attempt: str, fingerprint: bytes = b"", terms: Terms
    ) -> Answer:
        won = False
        try:
            answer = await super().claim(key, attempt=attempt, fingerprint=fingerprint, terms=terms)
            won = isinstance(answer, Won)
        finally:
            if won:
                self._seal.put()
            else:
                self._seal.lift()
        return answer

    async def _check(self) -> None:
        await self._on_session(_connect)

    # --- ending -------------------------------------------------------------------------------

    async def complete(self, claim: Claim, outcome: Outcome) -> Verdict:
        """Commit the session with the outcome in it. Cut off meanwhile, it is finished first."""
        try:
            verdict = await self._colour.shield(self._complete(Completing(claim, outcome)))
        finally:
            self._seal.lift()
        return verdict or Lost()

    async def _complete(self, op: Completing) -> Verdict:
        if _is_error(op.outcome):
            await self._undo()
            return await self._ledger.complete(op.claim, op.outcome)
        if (sent := self._sent_of(op.claim)) is not None:
            return await self._resolve(sent, None)
        try:
            kept = await self._on_session(partial(self._commit, op))
        except Exception as error:  # noqa: BLE001 - the session's own hooks may raise anything
            if (sent := self._sent_of(op.claim)) is not None:
                return await self._resolve(sent, error)
            await self._give_back(op.claim, error)
            nothing = self._nothing(op.claim, error)
            raise nothing  # noqa: B904 - its cause is set, or it is that very error
        return Kept() if kept else await self._refused(op)

    def _sent_of(self, claim: Claim) -> Completing | None:
        sent = self._sent
        return sent if sent is not None and sent.claim.attempt == claim.attempt else None

    def _commit(self, op: Completing, session: orm.Session) -> bool:
        """On the session's side. False, and rolled back, when the claim is not the current one."""
        self._stage = Stage.NOTHING
        if self._seal.ended:
            raise _ended(op.claim)
        self._stage = Stage.ROWS
        session.flush()
        self._stage = Stage.RECORD
        link = _connect(session)
        op = run(fitting(link, op))
        if not run(recorded(link, op)):
            session.rollback()
            return False
        self._sent = op
        with self._seal.open():
            session.commit()
        return True

    async def release(self, claim: Claim, *, error: str | None = None) -> Verdict:
        try:
            return await super().release(claim, error=error)
        finally:
            self._seal.lift()

    async def renew(self, claim: Claim, *, lease_s: float | None = None) -> Verdict:
        try:
            return await super().renew(claim, lease_s=lease_s)
        finally:
            if lease_s == 0:
                self._seal.lift()

    # --- ending badly -------------------------------------------------------------------------

    async def _resolve(self, op: Completing, error: Exception | None) -> Verdict:
        """After a COMMIT without an answer: has it happened? The record knows."""
        await self._undo()
        verdict = await self._released(op.claim, error)
        if isinstance(verdict, Kept):
            raise self._nothing(op.claim, error or _cut_off(op.claim))
        if verdict.outcome != op.outcome:
            return verdict
        if error is not None:
            log.warning(
                "semel: %r was committed, although its commit said: %s", op.claim.key.text, error
            )
        return Kept()

    async def _released(self, claim: Claim, error: Exception | None) -> Verdict:
        """Ask until the row is no longer locked and the store answers, for a bounded time."""
        until = self._colour.now() + RESOLVE_WITHIN_S
        why = f"its transaction was not committed: {said(error) if error else 'cut off'}"
        while True:
            try:
                return await self._ledger.release(claim, error=why)
            except StoreUnavailableError as trouble:
                if self._colour.now() + RESOLVE_PAUSE_S > until:
                    raise _unknown(claim, trouble) from error
            await self._colour.sleep(RESOLVE_PAUSE_S)

    def _nothing(self, claim: Claim, error: Exception) -> Exception:
        """What to raise when nothing has happened: what is not the store's trouble, as it is."""
        if isinstance(error, SemelError) or not self._is_stores(claim, error):
            return error
        nothing: SemelError | None = elsewhere(error) if self._stage is Stage.RECORD else None
        nothing = nothing or StoreUnavailableError(
            f"{claim.key.text!r}: its transaction was rolled back: {said(error)}. Nothing has "
            "happened; call again",
            again=False,
        )
        nothing.__cause__ = error
        return nothing

    def _is_stores(self, claim: Claim, error: Exception) -> bool:
        """Rows that violate a constraint, now or when they are committed, are the handler's."""
        if isinstance(error, exc.OperationalError) or fault_of(error) in PASSING:
            return True
        return self._stage is Stage.RECORD and self._sent_of(claim) is None

    async def _give_back(self, claim: Claim, error: Exception) -> None:
        await self._undo()
        try:
            await self._ledger.release(claim, error=f"{type(error).__name__}: {said(error)}")
        except SemelError as unreleased:  # then its lease has to run out
            log.warning("semel: %r could not be released: %s", claim.key.text, unreleased)

    def _carriers(self) -> Collection[sa.Connection]:
        return self._seal.carriers()

    async def _roll_back(self) -> None:
        await self._on_session(_roll_back)


def _is_error(outcome: Outcome) -> bool:
    return outcome.kind == "error" or (outcome.status is not None and outcome.status >= FIRST_ERROR)


def _connect(session: orm.Session) -> Link:
    connection = session.connection()
    refuse_autocommit(connection)
    _refuse_joined(session, connection)
    return bound_link(connection)


def _refuse_joined(session: orm.Session, connection: sa.Connection) -> None:
    """A session that was given a connection in a transaction leaves the COMMIT to others."""
    for there, transaction, commits, _ in joins(session):
        if there is connection and not (commits and transaction is connection.get_transaction()):
            raise SettingsError(
                "this session is joined to a connection whose transaction somebody else commits, "
                "so its own commit commits nothing and no response could be told; give it an "
                "engine, or bind it without commit=True"
            )


def _roll_back(session: orm.Session) -> None:
    """Take the rows back, if need be by hanging up: they must not be committed any more."""
    try:
        session.rollback()
    except Exception:
        session.invalidate()
        raise


def _ended(claim: Claim) -> SettingsError:
    return SettingsError(
        f"the session was ended before the response of {claim.key.text!r} was recorded, so its "
        "rows are gone and nothing was recorded. Keep it open until the response is recorded: "
        "whoever made it must not close or roll it back earlier (in FastAPI, a dependency with "
        'yield and without scope="function"; in Flask, a session of your own instead of one that '
        "ends with the app context)"
    )


def _cut_off(claim: Claim) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"{claim.key.text!r} was cut off while its transaction was committed, and that was rolled "
        "back. Nothing has happened; call again",
        again=False,
    )


def _unknown(claim: Claim, trouble: StoreUnavailableError) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"the transaction of {claim.key.text!r} was committed without an answer, and whether it "
        f"has happened cannot be asked now: {trouble}. Call again with the same key: that finds "
        "out, and runs it only if it has not happened",
        again=False,
    )
