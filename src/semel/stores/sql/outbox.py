"""Events that wait for the caller's COMMIT.

`collect` writes nothing. It hangs the event on the transaction of the session's connection, and
the connection's own commit event, which fires whoever commits, writes what hangs there
(`outbox_writing`). So counters are locked for the time of a COMMIT and not for the time of a
request, and all of them at once, in one order.

A rollback drops what hangs on its transaction. A savepoint that is rolled back drops its own; one
that is released leaves them to what is around it. What cannot be written fails the COMMIT, and
takes the caller's rows back first: SQLAlchemy takes a failed commit for the end of the
transaction, while the database has not heard of it, so a later commit on the same connection
would bring in the rows without their events.

Relays in this process are told when something was written (`outbox_bell`).

An async session has a connection only once it has awaited something. Until then its events wait
with the session's own transaction, and are hung on the connection when that is about to commit.
However an event got there, it is written in the order in which it was added.
"""

from __future__ import annotations

import itertools
import weakref
from operator import attrgetter
from typing import Any, TypeAlias

import sqlalchemy as sa
from sqlalchemy import event, exc, orm
from sqlalchemy.engine import RootTransaction, TwoPhaseTransaction
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.util import concurrency

from semel.colour import run
from semel.errors import SettingsError
from semel.stores.sql.bound import Session, bound_link, refuse_autocommit
from semel.stores.sql.dialects import refuse_unknown
from semel.stores.sql.endings import (
    refuse_driver_autocommit,
    refuse_lost,
    take_back,
    watch_losses,
)
from semel.stores.sql.faults import Fault, NoTableError, fault_of
from semel.stores.sql.outbox_bell import ring
from semel.stores.sql.outbox_writing import Entry, write

__all__ = ["Entry", "collect"]


class Held:
    """An event, its place among the others, and how deep in savepoints it was added.

    `owner` is the async session's transaction that it still waits with, if it does; `hung_on` the
    database's transaction that knows of it.
    """

    __slots__ = ("depth", "entry", "hung_on", "owner", "place")

    def __init__(self, entry: Entry, owner: orm.SessionTransaction | None = None) -> None:
        self.entry = entry
        self.place = next(_places)
        self.depth = 0
        self.owner = None if owner is None else weakref.ref(owner)
        self.hung_on: weakref.ref[RootTransaction] | None = None

    @property
    def stands(self) -> bool:
        """Has nobody rolled back the session that it waits with?"""
        if self.owner is None:
            return True
        owner = self.owner()
        return owner is not None and owner.is_active


_places = itertools.count()

Waiting: TypeAlias = weakref.WeakKeyDictionary[Any, list[Held]]

# By the database transaction; and by the session's, where that is all there is yet. Weakly: what
# nobody commits any more is gone with its transaction, however that ended.
_on_connection: Waiting = weakref.WeakKeyDictionary()
_on_session: Waiting = weakref.WeakKeyDictionary()

# Whose commit has written its events, or is about to: another would come too late.
_committing: weakref.WeakSet[RootTransaction] = weakref.WeakSet()


def collect(session: Session, entry: Entry) -> None:
    """Have the event written by the COMMIT of this session's, or connection's, transaction."""
    given = _sync_side(session)
    if isinstance(given, sa.Connection):
        _hang(Held(entry), given)
        return
    bind = _bind_of(given)
    if _can_wait(bind.dialect):
        _hang(Held(entry), given.connection())
    else:
        refuse_autocommit(bind)
        _wait_with(given, bind, entry)


# --- what one can be given ----------------------------------------------------------------------


def _sync_side(session: Session) -> orm.Session | sa.Connection:
    given: Any = session
    if isinstance(given, orm.scoped_session | async_scoped_session):
        given = given()
    if isinstance(given, AsyncConnection):
        given = given.sync_connection or given
    elif isinstance(given, AsyncSession):
        given = given.sync_session
    if isinstance(given, sa.Connection | orm.Session):
        return given
    raise SettingsError(
        f"an event cannot be added to {_named(given)}; give the SQLAlchemy session or connection "
        "whose transaction is to carry it"
    )


def _named(given: Any) -> str:
    name = type(given).__name__
    return f"{name} that is not open yet" if isinstance(given, AsyncConnection) else f"a {name}"


def _bind_of(session: orm.Session) -> sa.Engine | sa.Connection:
    if session.twophase:
        raise _two_phases()
    try:
        return session.get_bind()
    except exc.UnboundExecutionError as error:
        raise SettingsError(
            "this session has several engines and none for everything, so it is not clear which "
            "transaction is to carry the event; give the connection: "
            "add(session.connection(bind_arguments={...}), event)"
        ) from error


def _two_phases() -> SettingsError:
    return SettingsError(
        "this is a two-phase transaction: between PREPARE and COMMIT its events would hold up "
        "everybody else's for as long as it likes; add them in a transaction of one phase"
    )


def _can_wait(dialect: sa.Dialect) -> bool:
    """May the driver be asked for something here? An async one only where it can be awaited."""
    return not dialect.is_async or concurrency.in_greenlet()


# --- on the connection --------------------------------------------------------------------------


def _hang(held: Held, connection: sa.Connection) -> None:
    held.owner = None
    _put_on(connection.get_transaction() or _begun(connection), held, connection)


def _put_on(transaction: RootTransaction, held: Held, connection: sa.Connection) -> None:
    held.depth = _depth(connection)
    if held.hung_on is None or held.hung_on() is not transaction:
        held.hung_on = weakref.ref(transaction)
        _list_of(transaction, connection).append(held)


def _list_of(transaction: RootTransaction, connection: sa.Connection) -> list[Held]:
    if transaction in _committing:
        take_back(connection)
        raise SettingsError(
            "this transaction is being committed and its events are written, so another would be "
            "lost: it was rolled back. Add it before, such as in a before_commit hook of the "
            "session"
        )
    waiting = _on_connection.get(transaction)
    if waiting is None:
        _refuse_transaction(transaction, connection)
        _listen(connection)
        waiting = _on_connection[transaction] = []
    return waiting


def _refuse_transaction(transaction: RootTransaction, connection: sa.Connection) -> None:
    refuse_unknown(connection.dialect.name)
    refuse_autocommit(connection)
    if isinstance(transaction, TwoPhaseTransaction):
        raise _two_phases()


def _begun(connection: sa.Connection) -> RootTransaction:
    dispatch: Any = connection.dispatch
    if dispatch.begin and not _can_wait(connection.dialect):
        # A listener of the application's own that says BEGIN itself.
        raise SettingsError(
            "this connection has no transaction yet, and beginning it has to be awaited; "
            "write `await connection.begin()` before"
        )
    return connection.begin()


def _depth(connection: sa.Connection) -> int:
    """The number of the innermost savepoint; 0 outside of all."""
    nested = connection.get_nested_transaction()
    return 0 if nested is None else _number(nested._savepoint)  # noqa: SLF001 - told nowhere else


def _number(savepoint: str) -> int:
    """SQLAlchemy names them sa_savepoint_1, 2, 3 and so on, and uses no name twice."""
    return int(savepoint.rpartition("_")[2])


def _listen(connection: sa.Connection) -> None:
    """On the engine, once: a session has a new Connection for each transaction.

    To listen on each of those takes as long as to write an event.
    """
    engine = connection.engine
    if not event.contains(engine, "commit", _commit):
        event.listen(engine, "rollback_savepoint", _rollback_savepoint)
        event.listen(engine, "commit", _commit)
        watch_losses(connection)
        if not event.contains(engine.pool, "checkin", _given_back):
            event.listen(engine.pool, "checkin", _given_back)


def _waiting_on(connection: sa.Connection) -> list[Held]:
    transaction = connection.get_transaction()
    return [] if transaction is None else _on_connection.get(transaction, [])


def _taken_from(connection: sa.Connection) -> list[Entry]:
    """What its transaction is to write, in the order in which it was added; nothing follows."""
    waiting = _waiting_on(connection)
    standing = [held for held in waiting if held.stands]
    waiting.clear()
    if (transaction := connection.get_transaction()) is not None:
        _committing.add(transaction)
    if len(standing) > 1:
        standing.sort(key=attrgetter("place"))
    return [held.entry for held in standing]


def _rollback_savepoint(connection: sa.Connection, name: str, _: Any) -> None:
    """Drop what was added in it, or in one inside it: those have larger numbers, released or not.

    One that was released keeps its number, and no later savepoint has a smaller one.
    """
    waiting = _waiting_on(connection)
    waiting[:] = [held for held in waiting if held.depth < _number(name)]


def _commit(connection: sa.Connection) -> None:
    entries = _taken_from(connection)
    if not entries:
        return
    try:
        refuse_driver_autocommit(connection, "the rows were committed before their events could be")
        refuse_lost(connection)
        run(write(bound_link(connection), entries))
    except BaseException as error:
        take_back(connection)
        if isinstance(error, exc.SQLAlchemyError) and fault_of(error) is Fault.NO_TABLE:
            raise _no_table() from error
        raise
    connection.info[_TELLS] = True
    ring()


_TELLS = "semel.outbox.tells"


def _given_back(_: Any, record: Any) -> None:
    """The connection goes back to its pool: by now its commit is over."""
    if record.info.pop(_TELLS, False):
        ring()


def _no_table() -> NoTableError:
    return NoTableError(
        "there is no table event_outbox, or no event_outbox_seq; run `semel db init URL`. The "
        "transaction was rolled back"
    )


# --- with an async session that has no connection yet -------------------------------------------


def _wait_with(session: orm.Session, bind: sa.Engine | sa.Connection, entry: Entry) -> None:
    transaction = _transaction_of(session)
    held = Held(entry, transaction)
    _on_session.setdefault(transaction, []).append(held)
    if not event.contains(session, "before_commit", _before_commit):
        event.listen(session, "before_commit", _before_commit)
        event.listen(session, "after_commit", _after_commit)
    if isinstance(bind, sa.Connection) and (around := bind.get_transaction()) is not None:
        # Whoever began that one may commit it without asking the session.
        _put_on(around, held, bind)


def _transaction_of(session: orm.Session) -> orm.SessionTransaction:
    if not session.in_transaction():
        if not session.autobegin:
            raise SettingsError("this session has no transaction yet; begin it before")
        return session.begin()
    transaction = session.get_nested_transaction() or session.get_transaction()
    assert transaction is not None, "in_transaction() said so"
    return transaction


def _before_commit(session: orm.Session) -> None:
    """Told of savepoints too, and where waiting for a connection is possible."""
    nested, root = session.get_nested_transaction(), session.get_transaction()
    if nested is not None:
        _hang_below(root, session)
    for held in _on_session.pop(nested or root, ()):
        _hang(held, session.connection())


def _hang_below(root: orm.SessionTransaction | None, session: orm.Session) -> None:
    """Whoever commits the whole with a savepoint open is told of no other commit after this."""
    for held in _on_session.get(root, ()):
        if held.hung_on is None:
            _hang(held, session.connection())
            held.depth = 0  # the savepoint may be rolled back, and this was added outside of it


def _after_commit(session: orm.Session) -> None:
    """What went with a session that is joined to a connection stays with that one's commit."""
    if session.get_nested_transaction() is None:
        for held in _on_session.pop(session.get_transaction(), ()):
            held.owner = None
