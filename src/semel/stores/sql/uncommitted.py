"""Release a claim when the COMMIT with its outcome fails.

`BoundLedger.complete` writes the outcome in the session's transaction, and the caller commits it
later. That COMMIT can fail, for example with a serialization failure. Without a release the key
would stay leased although no call is running.

The release is safe where the result of a COMMIT is unknown. It carries the fencing token, and a
transaction that can still be committed holds the lock of the row, which keeps the release out.
After a rollback without a COMMIT the claim stays: the caller may complete it in a new transaction.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy import event, orm

from semel.values import value

_NAME = "semel.uncommitted"


@value
class _Recorded:
    """An outcome that was written in the session's transaction, and how to release its claim."""

    connection: sa.Connection
    release: Callable[[], None]


class _Uncommitted:
    """The outcomes in a session's transaction, and whether its COMMIT was tried."""

    def __init__(self, session: orm.Session) -> None:
        self.recorded: list[_Recorded] = []
        self._is_tried = False
        event.listen(session, "before_commit", self._before_commit)
        event.listen(session, "after_commit", self._after_commit)
        event.listen(session, "after_transaction_end", self._after_end)

    def _before_commit(self, session: orm.Session) -> None:
        # SQLAlchemy sends these events for savepoints too.
        if session.get_nested_transaction() is None:
            self._is_tried = True

    def _after_commit(self, session: orm.Session) -> None:
        if session.get_nested_transaction() is None:
            self.recorded = []

    def _after_end(self, _: orm.Session, transaction: orm.SessionTransaction) -> None:
        if transaction.parent is not None:
            return
        recorded, self.recorded = self.recorded, []
        tried, self._is_tried = self._is_tried, False
        for each in recorded:
            # A transaction that the session only joined is still open, and may hold the row.
            if tried and (each.connection.closed or not each.connection.in_transaction()):
                each.release()


def release_if_commit_fails(
    session: orm.Session, connection: sa.Connection, release: Callable[[], None]
) -> None:
    """Call `release` if the session's transaction ends after a COMMIT that failed."""
    watch: _Uncommitted | None = session.info.get(_NAME)
    if watch is None:
        watch = session.info[_NAME] = _Uncommitted(session)
    watch.recorded.append(_Recorded(connection, release))
