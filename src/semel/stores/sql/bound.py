"""A ledger bound to the caller's transaction.

`complete` is an UPDATE by fence in the caller's session: the record and the business rows are
committed together or not at all, and a crash leaves only a lease. `claim`, `renew`, `note` and
`release` are committed at once on the store's own connections, so that others see a running claim
and learn that it is busy without waiting for the session.

A claim that is no longer current must not let its business rows through: the session is rolled
back before the answer is `Lost`, and before a claim is given up. That also frees SQLite's only
write lock, behind which the `release` would wait in vain. A transaction in which the outcome could
not be written is dead: it is rolled back, the claim is released, and nothing has happened.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import sqlalchemy as sa
from sqlalchemy import exc, orm
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.util import await_only

from semel.colour import ASYNC, SYNC, Colour, run
from semel.errors import SemelError, SettingsError, StoreUnavailableError
from semel.ports import StoreLedger
from semel.stores import rules
from semel.stores.rules import Completing
from semel.stores.sql import encodings, fenced, generic, limits
from semel.stores.sql.dialects import Dialect, dialect_named
from semel.stores.sql.faults import elsewhere
from semel.stores.sql.ledger import SQLLedger
from semel.stores.sql.links import AsyncBoundLink, BoundLink, Link
from semel.stores.sql.uncommitted import release_if_commit_fails
from semel.stores.sql.writing import (
    begin_before_savepoints,
    carriers,
    follow_writing,
    refuse_writing,
    watch_writing,
)
from semel.values import Answer, Claim, Kept, Key, Lost, Outcome, Terms, Verdict

if TYPE_CHECKING:
    from semel.stores.sql import SQLStore

log = logging.getLogger("semel")

Session: TypeAlias = (
    orm.Session
    | orm.scoped_session[Any]
    | sa.Connection
    | AsyncSession
    | async_scoped_session[Any]
    | AsyncConnection
)

_ASYNC = (AsyncSession, async_scoped_session, AsyncConnection)
_SYNC = (orm.Session, orm.scoped_session, sa.Connection)


class BoundStore:
    """A store for one session. It holds nothing of its own: closing it does nothing."""

    def __init__(self, store: SQLStore, session: Session) -> None:
        if not isinstance(session, (*_ASYNC, *_SYNC)):
            raise SettingsError(
                f"bind() got a {type(session).__name__}; give it the SQLAlchemy session or "
                "connection whose transaction is to carry the outcome"
            )
        self._session = session
        self._colour = ASYNC if isinstance(session, _ASYNC) else SYNC
        bound: Any = BoundLedger(cast("SQLLedger", store.ledger(self._colour)), session)
        self._ledger: StoreLedger = bound

    def ledger(self, colour: Colour) -> StoreLedger:
        if colour.name != self._colour.name:
            raise SettingsError(
                f"this store is bound to {type(self._session).__name__}, which serves "
                f"{self._colour.name} code; bind it to a session of the {colour.name} colour"
            )
        return self._ledger

    def close(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


class BoundLedger:
    """The store's own ledger, except for how a claim begins and ends."""

    def __init__(self, ledger: SQLLedger, session: Session) -> None:
        self._ledger = ledger
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    async def claim(
        self, key: Key, *, attempt: str, fingerprint: bytes = b"", terms: Terms
    ) -> Answer:
        try:
            await self._check()
        except exc.SQLAlchemyError as error:
            raise StoreUnavailableError(
                f"the session cannot carry the outcome of key {key.text!r}: {said(error)}; "
                "nothing has happened: roll it back, or open another, and call again",
                again=False,
            ) from error
        return await self._ledger.claim(key, attempt=attempt, fingerprint=fingerprint, terms=terms)

    async def complete(self, claim: Claim, outcome: Outcome) -> Verdict:
        op = Completing(claim, outcome)
        try:
            link = await self._link()
            op = await fitting(link, op)
            if await recorded(link, op):
                self._release_if_commit_fails(claim)
                return Kept()
        except exc.SQLAlchemyError as error:
            raise await self._dead(claim, error) from error
        await self._roll_back()
        return await self._refused(op)

    def _release_if_commit_fails(self, claim: Claim) -> None:
        given = self._sync_side()
        for connection in self._carriers() if isinstance(given, orm.Session) else ():
            release_if_commit_fails(given, connection, partial(self._release_now, claim))

    def _release_now(self, claim: Claim) -> None:
        """Release the claim inside an event of the session, which is a sync call.

        With an async session, the task that ends the session waits for the release.
        """
        release = self._ledger.release(claim, error="its transaction was not committed")
        try:
            if isinstance(self._session, _ASYNC):
                await_only(release)
            else:
                run(release)
        except (SemelError, exc.MissingGreenlet) as error:  # then the lease has to expire
            release.close()
            log.warning("semel: %r could not be released: %s", claim.key.text, error)

    async def _check(self) -> None:
        """Refuse a session that cannot carry the outcome, before anything runs."""
        await self._link()

    async def _refused(self, op: Completing) -> Lost:
        """After the rows are gone: who has the claim now?"""
        try:
            return await self._ledger.run(lambda own: _refusal(own, op))
        except StoreUnavailableError as error:
            raise StoreUnavailableError(
                f"the claim on {op.claim.key.text!r} is not the current one, so its transaction "
                f"was rolled back; what has become of it cannot be asked now: {error}. Nothing of "
                "it has happened; call again",
                again=False,
            ) from error

    async def _dead(self, claim: Claim, error: exc.SQLAlchemyError) -> SemelError:
        """End the transaction for everybody: what it cannot record must not be committed."""
        await self._undo()
        why = f"its outcome could not be written in the session's transaction: {said(error)}"
        try:
            await self._ledger.release(claim, error=why)
        except SemelError as unreleased:  # then its lease has to run out
            log.warning("semel: %r could not be released: %s", claim.key.text, unreleased)
        return elsewhere(error) or StoreUnavailableError(
            f"{claim.key.text!r}: {why}. That transaction is dead and nothing of it has happened: "
            "roll it back and call again",
            again=False,
        )

    async def release(self, claim: Claim, *, error: str | None = None) -> Verdict:
        await self._undo()
        return await self._ledger.release(claim, error=error)

    async def renew(self, claim: Claim, *, lease_s: float | None = None) -> Verdict:
        # A lease of 0 gives the claim up; any other renewal comes from the background, where the
        # session must not be touched.
        if lease_s == 0:
            await self._undo()
        return await self._ledger.renew(claim, lease_s=lease_s)

    async def note(self, claim: Claim, name: str, data: bytes) -> Verdict:
        refuse_writing(self._carriers(), name)
        return await self._ledger.note(claim, name, data)

    def _carriers(self) -> Collection[sa.Connection]:
        """The connection of the session's transaction, if there is one; nothing is connected."""
        given = self._sync_side()
        return [given] if isinstance(given, sa.Connection) else list(carriers(given))

    def _sync_side(self) -> Any:
        """The sync session or connection; None for an async connection that is not open."""
        given: Any = self._session
        if isinstance(given, orm.scoped_session | async_scoped_session):
            given = given()
        return getattr(given, "sync_session", None) or getattr(given, "sync_connection", given)

    async def _undo(self) -> None:
        try:
            await self._roll_back()
        except exc.SQLAlchemyError as error:  # a dead connection has rolled back by itself
            log.warning("semel: the bound session could not be rolled back: %s", error)

    async def _link(self) -> Link:
        if isinstance(self._session, AsyncConnection | sa.Connection):
            connection: Any = self._session
        elif isinstance(self._session, AsyncSession | async_scoped_session):
            connection = await self._session.connection()
        else:
            connection = self._session.connection()
        refuse_autocommit(connection)
        sync = getattr(connection, "sync_connection", None) or connection
        begin_before_savepoints(sync)
        watch_writing(sync)
        if connection is self._session:
            follow_writing(sync)
        return bound_link(connection)

    async def _roll_back(self) -> None:
        rolled_back = self._session.rollback()
        if rolled_back is not None:
            await rolled_back


# A dialect knows how its statements are said and what fits into one; both are asked only once.
_dialects: weakref.WeakKeyDictionary[sa.Dialect, Dialect] = weakref.WeakKeyDictionary()


def _dialect(given: sa.Dialect) -> Dialect:
    found = _dialects.get(given)
    if found is None:
        found = _dialects[given] = dialect_named(given.name, given.paramstyle)
    return found


def bound_link(connection: sa.Connection | AsyncConnection) -> Link:
    dialect = _dialect(connection.dialect)
    if isinstance(connection, AsyncConnection):
        assert connection.sync_connection is not None, "its session has connected it"
        encodings.learn(dialect, connection.sync_connection)
        return AsyncBoundLink(connection, dialect)
    encodings.learn(dialect, connection)
    return BoundLink(connection, dialect)


def codec_of(given: sa.Dialect) -> str:
    """Return the codec for which texts in the ledger's columns are escaped on this engine.

    UTF-8 until a link of the engine has been made, see `encodings.learn`.
    """
    return _dialect(given).codec


async def fitting(link: Link, op: Completing) -> Completing:
    return limits.fitting(op, await limits.packet(link))


def said(error: Exception) -> object:
    """What the driver said, without SQLAlchemy's statement and values."""
    return getattr(error, "orig", None) or error


def refuse_autocommit(connection: Any) -> None:
    level = getattr(connection.dialect, "_on_connect_isolation_level", None)
    sync = getattr(connection, "sync_connection", None) or connection
    if sync.get_execution_options().get("isolation_level", level) == "AUTOCOMMIT":
        raise SettingsError(
            "the session is in AUTOCOMMIT mode, so there is no transaction to bind to; give it an "
            "engine with another isolation level"
        )


async def recorded(link: Link, op: Completing) -> bool:
    """Write the outcome, in the link's transaction. False when the claim is not the current one."""
    return await fenced.complete(link, op) or await _repeated(link, op)


async def _repeated(link: Link, op: Completing) -> bool:
    """Was this very outcome recorded before, perhaps in this transaction?"""
    now_us, row = await generic.read_one(link, op.claim.key.id)
    verdict, changed = rules.complete(row, op, now_us)
    return isinstance(verdict, Kept) and changed is None


async def _refusal(own: Link, op: Completing) -> Lost:
    """Who has it now, as committed."""
    now_us, row = await generic.read_one(own, op.claim.key.id)
    verdict, changed = rules.complete(row, op, now_us)
    if changed is not None:
        raise SettingsError(
            "the session's snapshot is older than the claim, so its transaction cannot see the "
            "record; claim before the session's first statement, or use READ COMMITTED. Or is the "
            "store over another database than the session?"
        )
    return verdict if isinstance(verdict, Lost) else Lost(op.outcome)
