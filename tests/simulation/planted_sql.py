"""Idempotency by hand, over one table with transactions: with care, and with the seed's defects.

`Careful` does everything right; each defect is planted in it alone. `Seed` is the handler as the
seed has it, with all of them at once.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from sql_world import (
    RETRY_S,
    Database,
    LostConnectionError,
    Row,
    Session,
    SqlWorld,
    UniqueError,
)
from web_promises import Answer, Arrival
from web_world import LEASE_S, REQUEST, HandlerError

from semel.http import problem

# --- by hand, with care -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    tenant: str
    key: str
    hash: tuple[str, int]


BUSY, REUSED, DOWN = "in-progress", "key-reused", "store-unavailable"


class Careful:
    """One row per tenant and key: claimed and committed first, recorded with the effect.

    A row has a state, a token and a lease. Whoever finishes does so by its token, in the
    transaction of its effect, and rolls that back if it is no longer its turn.
    """

    def __init__(self, world: SqlWorld) -> None:
        self.world = world

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        arrival = REQUEST.get()
        while message := await receive():
            if message["type"] == "http.disconnect":
                return
            if not message["more_body"]:
                break
        asked = Asked(
            arrival.subject.tenant,
            arrival.subject.name,
            (arrival.content.path, arrival.content.amount),
        )
        answer = await self.answer(self.identity(asked), asked, arrival)
        if isinstance(answer, str):
            said = problem(answer, "")
            answer = Answer(said.status, said.headers, said.body or b"")
        start = {"type": "http.response.start", "status": answer.status}
        await send({**start, "headers": list(answer.headers)})
        await send({"type": "http.response.body", "body": answer.body})

    def identity(self, asked: Asked) -> Any:
        return asked.tenant, asked.key

    async def answer(self, name: Any, asked: Asked, arrival: Arrival) -> Answer | str:
        try:
            found = await self.claim(name, asked, arrival.id)
        except LostConnectionError:
            return DOWN
        return found or await self.run(name, arrival)

    # Claiming.

    async def claim(self, name: Any, asked: Asked, token: str) -> Answer | str | None:
        """None when it is ours. Sent again under the same token, it is ours again."""
        try:
            return await self._alone("change", name, lambda row: self.decide(row, asked, token))
        except LostConnectionError:
            return await self._alone("change", name, lambda row: self.decide(row, asked, token))

    async def _alone(self, verb: str, *args: Any) -> Any:
        """One statement in a transaction of its own."""
        session = Session(self.world)
        try:
            answer = await session.run(verb, *args)
            await session.commit()
            return answer
        finally:
            session.drop()

    def decide(self, row: Row | None, asked: Asked, token: str) -> tuple[Row | None, Any]:
        now_s = self.world.loop.clock_s
        ours = {"hash": asked.hash, "state": "PENDING", "token": token, "until_s": now_s + LEASE_S}
        if row is None:
            return ours, None
        if not self.same(row, asked):
            return None, REUSED
        if row["state"] == "COMPLETED":
            return None, row["response"]
        if row["state"] == "PENDING" and not self.lapsed(row, now_s) and row["token"] != token:
            return None, BUSY
        return ours, None

    def same(self, row: Row, asked: Asked) -> bool:
        return bool(row["hash"] == asked.hash)

    def lapsed(self, row: Row, now_s: float) -> bool:
        return bool(row["until_s"] <= now_s)

    # Running.

    async def run(self, name: Any, arrival: Arrival) -> Answer | str:
        session = Session(self.world)
        try:
            made = await self.world.transfer(session, arrival)
            if not await self.record(session, name, arrival.id, made):
                await session.rollback()
                return BUSY
            return await self.finish(session, name, arrival.id, made)
        except HandlerError:
            await self.failed(session, name, arrival.id)
            raise
        except LostConnectionError:
            return DOWN  # before the commit: rolled back, and free when its lease is over
        finally:
            session.drop()

    async def record(self, session: Session, name: Any, token: str, made: Answer) -> bool:
        def decide(row: Row | None) -> tuple[Row | None, bool]:
            if row is None or row["token"] != token or row["state"] != "PENDING":
                return None, False
            return {**row, "state": "COMPLETED", "response": made}, True

        return bool(await session.run("change", name, decide))

    async def finish(self, session: Session, name: Any, token: str, made: Answer) -> Answer | str:
        try:
            await session.commit()
        except LostConnectionError:
            return await self.find_out(name, token, made)
        return made

    async def find_out(self, name: Any, token: str, made: Answer) -> Answer | str:
        """A commit without an answer: the row went with it, so the row knows."""
        while True:
            try:
                row = await self._alone("change", name, lambda row: (None, row))
            except LostConnectionError:
                await asyncio.sleep(RETRY_S)
                continue
            done = row is not None and row["state"] == "COMPLETED" and row["token"] == token
            return made if done else DOWN

    async def failed(self, session: Session, name: Any, token: str) -> None:
        try:
            await session.rollback()
            await self._alone("change", name, lambda row: self.give_up(row, token))
        except LostConnectionError:
            pass  # then its lease has to run out

    def give_up(self, row: Row | None, token: str) -> tuple[Row | None, None]:
        mine = row is not None and row["token"] == token and row["state"] == "PENDING"
        return ({**row, "state": "FAILED"} if row is not None and mine else None), None

    @staticmethod
    def reap(database: Database) -> None:
        """Nothing is old enough here."""


# --- the seed's defects, one at a time ----------------------------------------------------------

DEFECTS: dict[str, tuple[type[Careful], str]] = {}


def defect(breaks: str) -> Callable[[type[Careful]], type[Careful]]:
    def plant(cls: type[Careful]) -> type[Careful]:
        name = "".join(f"_{c.lower()}" if c.isupper() else c for c in cls.__name__).strip("_")
        DEFECTS[name] = (cls, breaks)
        return cls

    return plant


@defect("answered 500, and nothing had failed")
class CheckThenLock(Careful):
    """SELECT finds nothing, twice; the second INSERT meets the first."""

    async def claim(self, name: Any, asked: Asked, token: str) -> Answer | str | None:
        row = await self._alone("select", name)
        if row is not None:
            return await super().claim(name, asked, token)
        ours, _ = self.decide(None, asked, token)
        await self._alone("insert", name, ours)
        return None


@defect("a debit was made twice")
class FailedAfterAnUnknownCommit(Careful):
    """An error on COMMIT is taken for a rollback."""

    async def find_out(self, name: Any, token: str, made: Answer) -> Answer | str:
        await self._alone("change", name, lambda row: ({**row, "state": "FAILED"}, None))
        return DOWN


@defect("another tenant's response")
class KeyAlone(Careful):
    def identity(self, asked: Asked) -> Any:
        return asked.key


@defect("the response for another payload")
class HashNeverCompared(Careful):
    def same(self, row: Row, asked: Asked) -> bool:
        return True


@defect("a duplicate had to wait for the first")
class LockNotCommitted(Careful):
    """The row is inserted in the handler's own transaction: nobody sees it, and all wait for it."""

    async def answer(self, name: Any, asked: Asked, arrival: Arrival) -> Answer | str:
        session = Session(self.world)
        try:
            decide = self.decide
            found = await session.run("change", name, lambda row: decide(row, asked, arrival.id))
            if found is not None:
                return found
            made = await self.world.transfer(session, arrival)
            await self.record(session, name, arrival.id, made)
            return await self.finish(session, name, arrival.id, made)
        except LostConnectionError:
            return DOWN
        finally:
            session.drop()


@defect("a last client was told in-progress")
class NoLease(Careful):
    """PENDING, by somebody who is no more."""

    def lapsed(self, row: Row, now_s: float) -> bool:
        return False


@defect("a debit was made twice")
class LiveRowReaped(Careful):
    """The clean-up deletes what looks old; the UPDATE of whoever ran then finds no row."""

    async def record(self, session: Session, name: Any, token: str, made: Answer) -> bool:
        def decide(row: Row | None) -> tuple[Row | None, bool]:
            return (None if row is None else {**row, "state": "COMPLETED", "response": made}), True

        return bool(await session.run("change", name, decide))

    @staticmethod
    def reap(database: Database) -> None:
        for name in [n for n, row in database.rows.items() if row["state"] == "PENDING"]:
            del database.rows[name]


@defect("half of a transfer was committed")
class HalfCommittedWithTheFailure(Careful):
    """`mark_failed` and its commit come with whatever the handler had written."""

    async def failed(self, session: Session, name: Any, token: str) -> None:
        await session.run("change", name, lambda row: self.give_up(row, token))
        await session.commit()


@defect("a last client was told 500")
class FailedForEver(Careful):
    """The row is in the way of the next INSERT."""

    def decide(self, row: Row | None, asked: Asked, token: str) -> tuple[Row | None, Any]:
        if row is not None and row["state"] == "FAILED" and row["token"] != token:
            raise UniqueError
        return super().decide(row, asked, token)


@defect("a debit was made twice")
class CommittedByTheHandler(Careful):
    """The handler commits its own rows, and the answer is recorded after that."""

    async def record(self, session: Session, name: Any, token: str, made: Answer) -> bool:
        await session.commit()
        return await super().record(session, name, token, made)


class Seed(Careful):
    """As the seed has it: look, lock, run, store, commit; or mark as failed, and commit."""

    def identity(self, asked: Asked) -> Any:
        return asked.key

    async def answer(self, name: Any, asked: Asked, arrival: Arrival) -> Answer | str:
        session = Session(self.world)
        try:
            cached = await session.run("select", name)
            if cached is not None and cached["state"] == "COMPLETED":
                return cached["response"]
            row = {"hash": asked.hash, "state": "PENDING", "token": arrival.id}
            await session.run("insert", name, row)
            try:
                made = await self.world.transfer(session, arrival)
                await self._mark(session, name, state="COMPLETED", response=made)
                await session.commit()
                return made
            except Exception:
                await self._mark(session, name, state="FAILED")
                await session.commit()
                raise
        finally:
            session.drop()

    async def _mark(self, session: Session, name: Any, **changes: Any) -> None:
        await session.run("change", name, lambda row: (row and {**row, **changes}, None))
