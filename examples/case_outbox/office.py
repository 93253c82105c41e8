"""The people: they open cases, upload scans, set deadlines and close, and change their minds."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

from cases import close_case, open_case, set_deadline, upload_document
from pieces import sessions
from sqlalchemy.orm import Session

UNREADABLE = "a coffee stain"
NEVER_MIND = "never mind"

# Of so many transactions, one is rolled back.
MINDS = 5


class ChangedMindError(Exception):
    """The whole transaction is taken back."""


class Office:
    """Somebody who works on cases, with a pause before each transaction."""

    def __init__(self, seed: int, pause_s: float) -> None:
        self._chance = random.Random(seed)
        self._pause_s = pause_s
        self.taken_back = 0

    def work_on(self, case: str, *, scan: str = "a lease") -> None:
        """From its first day to its last."""
        with self._transaction(case) as session:
            open_case(session, case, "a dispute")
            upload_document(session, case, f"{case}-1", scan)
        with self._transaction(case) as session:
            set_deadline(session, case, "1 May")
            upload_document(session, case, f"{case}-2", "a letter of March")
        with self._transaction(case) as session:
            set_deadline(session, case, "1 June")
            close_case(session, case, "settled")

    @contextlib.contextmanager
    def _transaction(self, case: str) -> Iterator[Session]:
        while self._chance.randrange(MINDS) == 0:
            self._change_mind(case)
        time.sleep(self._chance.uniform(0, 2 * self._pause_s))
        with sessions.begin() as session:
            yield session

    def _change_mind(self, case: str) -> None:
        """Rows are written and events are added, and all of it is taken back."""
        with contextlib.suppress(ChangedMindError), sessions.begin() as session:
            upload_document(session, case, f"{case}-0", NEVER_MIND)
            set_deadline(session, case, NEVER_MIND)
            session.flush()
            raise ChangedMindError
        self.taken_back += 1
