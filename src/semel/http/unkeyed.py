"""A request without a key, for a handler that is written once for both.

Nothing is claimed and nothing is recorded: a step just runs, a child key is new each time. What
stays the same is the session: bound to the attempt, it is committed before the answer is sent, and
an answer that is an error takes its rows back.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from semel import keys
from semel.attempt import Attempt
from semel.colour import ASYNC
from semel.errors import SettingsError
from semel.http.exchange import Exchange, Pace, RequestAttempt
from semel.http.protocol import Request
from semel.http.request import operation_of
from semel.http.rule import FIRST_ERROR, Ruling
from semel.ports import Store
from semel.values import Claim


class UnkeyedAttempt(RequestAttempt):
    """The attempt of a handler whose request has no key; its own is random."""

    keyed = False


class Unkeyed(Exchange):
    """What stands behind an attempt when there is no record behind it."""

    attempt_type = UnkeyedAttempt
    _session: LooseSession | None = None

    def __init__(self, ruling: Ruling, store: Store, request: Request, tenant: str) -> None:
        key = keys.make_key(
            secrets.token_hex(16),
            tenant=tenant,
            operation=operation_of(request),
            version=keys.HTTP,
        )
        super().__init__(ruling, store, ASYNC, key, b"", request, Pace())
        claim = Claim(key, self._attempt_id, b"", self.policy.terms)
        self.attempt = self.attempt_type(key, claim, self)
        self.home = self.colour.home()

    async def _note(self, attempt: Attempt, name: str, value: Any) -> None:
        pass

    def bind(self, session: Any) -> None:
        if not hasattr(self._store, "bind"):
            super().bind(session)  # says why not
        self._session = LooseSession(session)

    async def answered(self, status: int) -> None:
        """The handler has answered: its rows are kept, or taken back, before anybody hears it."""
        if not self.closed:
            self.closed = True
            self._end()
            if self._session is not None:
                await self._session.end(keep=status < FIRST_ERROR)


class LooseSession:
    """A session that is committed with an answer that nobody records."""

    def __init__(self, session: Any) -> None:
        from semel.stores.sql.committing import Seal

        given = session() if hasattr(session, "registry") else session
        self._sync: Any = getattr(given, "sync_session", given)
        self._async: Any = given if self._sync is not given else None
        self._seal = Seal(self._sync)

    async def end(self, *, keep: bool) -> None:
        try:
            await ASYNC.shield(self._end(keep=keep))
        finally:
            self._seal.lift()

    async def _end(self, *, keep: bool) -> None:
        work = self._commit if keep else self._roll_back
        if self._async is not None:
            await self._async.run_sync(work)
        else:
            await asyncio.to_thread(work, self._sync)

    def _commit(self, session: Any) -> None:
        if self._seal.ended:
            raise SettingsError(
                "the session was ended before the response was made, so its rows are gone. Keep "
                "it open until then: whoever made it must not close or roll it back earlier (in "
                'FastAPI, a dependency with yield and without scope="function")'
            )
        with self._seal.open():
            session.commit()

    def _roll_back(self, session: Any) -> None:
        session.rollback()
