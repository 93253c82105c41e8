"""The world of `web_world`, with an effect that is rows in a database.

`Database` is a model: READ COMMITTED, rows locked by whoever wrote them until their transaction
ends, COMMIT atomic on the server while its reply may be lost, the transactions of a dead process
rolled back. `Door` is an app whose handler binds its session; handlers that do without the door
are in `planted_sql`.

The door, the exchange and the guard's flow are the real ones; `BoundModel` stands for the bound
ledger of `SQLStore`, whose own code is tested against real servers in
`tests/faults/test_committing.py`.

    python tests/simulation/sql_world.py --seed 123
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from web_promises import MADE_BY, Answer, Arrival, Content, Subject
from web_world import (
    LEASE_S,
    REQUEST,
    HandlerError,
    Plant,
    Process,
    World,
    main,
    run_world,
    tenant_of,
)

from semel.colour import ASYNC
from semel.errors import StoreUnavailableError
from semel.http import IdempotencyMiddleware, Rule, attempt_of
from semel.stores import rules
from semel.stores.rules import Completing
from semel.testing.oracle import Oracle
from semel.testing.scenario import Report
from semel.testing.simulator import HOST, FaultyLedger, Network, NoAnswerError, Server, Weather
from semel.values import Kept

# A duplicate that meets no trouble is answered within this time, however long the first takes.
PROMPT_S = 0.5

RETRY_S = 0.02

SOMETIMES = (
    "crash", "pause", "cancel", "outage", "line_cut", "line_doubled", "hung_up", "reaped",
    "request_lost", "reply_lost", "commit_unanswered", "rolled_back", "replayed", "failed",
    "told_in-progress", "told_key-reused", "told_store-unavailable", "waited_for_a_lock",
)  # fmt: skip


# --- a database ---------------------------------------------------------------------------------


class LostConnectionError(Exception):
    """Nothing came back: what was asked last may have happened, or not."""


class UniqueError(Exception):
    """There is such a row already."""


class AbortedError(Exception):
    """The transaction has failed before; it can only be rolled back."""


class BlockedError(Exception):
    """Somebody else's transaction has written this row, and is not over."""


Row = dict[str, Any]


@dataclass(slots=True, eq=False)
class Transaction:
    """What one session has written and not committed."""

    host: Any
    rows: dict[Any, Row | None] = field(default_factory=dict)
    entries: list[tuple[str, str, str]] = field(default_factory=list)
    records: list[Completing] = field(default_factory=list)
    failed: bool = False
    over: bool = False


class Database:
    """Committed rows, the entries of a ledger of money, and who has locked what."""

    def __init__(self, server: LockingServer, wrong: Callable[[str], None]) -> None:
        self.rows: dict[Any, Row] = {}
        self.entries: list[tuple[str, str, str]] = []
        self.made: set[str] = set()
        self._locks: dict[Any, Transaction] = {}
        self._server = server
        self._wrong = wrong
        server.locker = self.locker

    def locker(self, name: Any) -> Transaction | None:
        """The transaction that is in the way; that of a dead process is rolled back here."""
        found = self._locks.get(name)
        if found is not None and found.host.dead:
            self.rollback(found)
            return None
        return found

    def lock(self, tx: Transaction, name: Any) -> None:
        if self.locker(name) not in (None, tx):
            raise BlockedError
        self._locks[name] = tx

    # Statements.

    def select(self, tx: Transaction, name: Any) -> Row | None:
        return tx.rows.get(name, self.rows.get(name))

    def insert(self, tx: Transaction, name: Any, row: Row) -> None:
        self.lock(tx, name)
        if self.select(tx, name) is not None:
            tx.failed = True
            raise UniqueError
        tx.rows[name] = row

    def change(self, tx: Transaction, name: Any, decide: Callable[[Row | None], Any]) -> Any:
        """SELECT FOR UPDATE, then an UPDATE: `decide` gives the row to write, and an answer."""
        self.lock(tx, name)
        row, answer = decide(self.select(tx, name))
        if row is not None:
            tx.rows[name] = row
        return answer

    def enter(self, tx: Transaction, place: str, kind: str, by: str) -> None:
        tx.entries.append((place, kind, by))

    def record(self, tx: Transaction, op: Completing) -> bool:
        """UPDATE by fence: an outcome that counts when the transaction is committed."""
        self.lock(tx, op.claim.key.id)
        row = self._server.row(op.claim.key.id)
        verdict, _ = rules.complete(row, op, self._server.now_us())
        if isinstance(verdict, Kept):
            tx.records.append(op)
        return isinstance(verdict, Kept)

    # The end.

    def commit(self, tx: Transaction) -> None:
        if tx.failed:
            raise AbortedError
        for name, row in tx.rows.items():
            if row is None:
                self.rows.pop(name, None)
            else:
                self.rows[name] = row
        self._enter_all(tx)
        self._end(tx)
        for op in tx.records:
            self._server.serve(op)

    def _enter_all(self, tx: Transaction) -> None:
        self.entries += tx.entries
        kinds = Counter(kind for _, kind, _ in tx.entries)
        if kinds["debit"] != kinds["credit"]:
            self._wrong("half of a transfer was committed")
        for place, kind, by in tx.entries:
            self.made.add(by)
            if sum(entry[:2] == (place, kind) for entry in self.entries) > 1:
                self._wrong(f"a {kind} was made twice")

    def rollback(self, tx: Transaction) -> None:
        self._end(tx)

    def _end(self, tx: Transaction) -> None:
        tx.over = True
        for name in [name for name, holder in self._locks.items() if holder is tx]:
            del self._locks[name]


class Session:
    """A connection and its transaction, as a handler knows them."""

    def __init__(self, world: SqlWorld) -> None:
        self._world = world
        self._tx: Transaction | None = None

    async def run(self, verb: str, *args: Any) -> Any:
        """A statement. It waits for rows that others have written."""
        while True:
            try:
                return await self._once(verb, *args)
            except BlockedError:
                self._world.hit("waited_for_a_lock")
                await asyncio.sleep(RETRY_S)

    async def _once(self, verb: str, *args: Any) -> Any:
        tx = self._tx = self._tx or Transaction(HOST.get())
        try:
            answer, error = await self._world.wire.ask(lambda: self._serve(tx, verb, args))
        except NoAnswerError:
            self.drop()
            raise LostConnectionError from None
        if error is not None:
            raise error
        return answer

    def _serve(self, tx: Transaction, verb: str, args: tuple[Any, ...]) -> tuple[Any, Any]:
        if tx.over:
            return None, LostConnectionError()
        if tx.failed and verb != "rollback":
            return None, AbortedError()
        try:
            return getattr(self._world.database, verb)(tx, *args), None
        except (BlockedError, UniqueError, AbortedError) as error:
            return None, error

    async def commit(self) -> None:
        if self._tx is not None:
            self._world.loop.note("commit", REQUEST.get().id)
            try:
                await self.run("commit")
            except LostConnectionError:
                self._world.hit("commit_unanswered")
                raise
            self._tx = None

    async def rollback(self) -> None:
        if self._tx is not None:
            self._world.hit("rolled_back")
            try:
                await self.run("rollback")
            finally:
                self._tx = None

    def drop(self) -> None:
        """Hang up: the server rolls back what is not committed."""
        tx, self._tx = self._tx, None
        if tx is not None and not tx.over:
            self._world.database.rollback(tx)


# --- what must hold -----------------------------------------------------------------------------


class Books:
    """What clients are told, and what the database has: both must be the same story."""

    def __init__(self, server: Server) -> None:
        self.hits: Counter[str] = Counter()
        self.violations: list[str] = []
        self.arrivals: dict[str, Arrival] = {}
        self.came_s: dict[Arrival, float] = {}
        self.database: Database
        self._server = server
        self._oracle = Oracle(self.wrong, self.hit)
        server.watch = self._watch

    def hit(self, what: str) -> None:
        self.hits[what] += 1

    def wrong(self, what: str) -> None:
        self._server.loop.note("WRONG", what)
        self.violations.append(what)

    def _watch(self, op: Any, before: Any, answer: Any, after: Any) -> None:
        self._server.loop.note(type(op).__name__, type(answer).__name__)
        self._oracle.watch(op, before, answer, after, self._server.now_us())

    def sending(self, arrival: Arrival, answer: Answer, *, to_somebody: bool) -> None:
        pass

    def sent(self, arrival: Arrival, answer: Answer) -> None:
        self._server.loop.note("sent", arrival.id, answer.status, answer.problem or "")
        name = answer.header(MADE_BY)
        if name is not None:
            self._check_success(arrival, self.arrivals[name.decode()])
        elif answer.problem is None:
            self._check_failure(arrival)
        else:
            self.hit(f"told_{answer.problem}")
            self._check_problem(arrival, answer.problem)
        self._check_prompt(arrival)

    def _check_success(self, arrival: Arrival, maker: Arrival) -> None:
        if maker is not arrival:
            self.hit("replayed")
        if maker.subject is not arrival.subject:
            self.wrong("a client was shown another tenant's response")
        elif maker.content != arrival.content:
            self.wrong("a client was shown the response for another payload")
        if maker.id not in self.database.made:
            self.wrong("a client was told that it happened, and it did not")

    def _check_failure(self, arrival: Arrival) -> None:
        self.hit("failed")
        if arrival.raised is None and not arrival.faults:
            self.wrong("a request was answered 500, and nothing had failed")

    def _check_problem(self, arrival: Arrival, name: str) -> None:
        if name == "store-unavailable" and arrival.id in self.database.made:
            self.wrong("a client was told that nothing was done, and it was")
        if name == "store-unavailable" and not arrival.faults:
            self.wrong("a client was told that the store is down, and it was not")
        contents = {other.content for other in arrival.subject.arrivals}
        if name == "key-reused" and len(contents) == 1:
            self.wrong("the same request was refused as another one")

    def _check_prompt(self, arrival: Arrival) -> None:
        """It is told that the first is under way, and not made to wait for it."""
        took_s = self._server.loop.clock_s - self.came_s[arrival]
        troubled = arrival.subject.troubled or arrival.paused
        if took_s > PROMPT_S and not arrival.ran and not troubled:
            self.wrong("a duplicate had to wait for the first")

    def ended(self, arrival: Arrival, error: BaseException | None) -> None:
        arrival.over = True
        if isinstance(error, asyncio.CancelledError) and not arrival.cancelled:
            self.wrong("a request was cancelled by nobody")

    def check_free(self, subject: Subject) -> None:
        pass

    def check_settled(self, subject: Subject, last: Answer | None) -> None:
        if last is None or last.header(MADE_BY) is None:
            told = None if last is None else last.problem or last.status
            self.wrong(f"after all faults, a last client was told {told}")


# --- the world ----------------------------------------------------------------------------------


class LockingServer(Server):
    """The ledger's rows, in the same database: an operation waits for who has written its row."""

    locker: Callable[[Any], Any] = staticmethod(lambda _: None)

    def serve_unlocked(self, op: Any) -> Any:
        blocked = self.locker(rules.key_of(op).id) is not None
        return BlockedError() if blocked else self.serve(op)


class LockedLedger(FaultyLedger):
    server: LockingServer

    async def perform(self, op: Any) -> Any:
        await self._gather()
        while True:
            answer = await self.ask(lambda: self.server.serve_unlocked(op))
            if not isinstance(answer, BlockedError):
                return answer
            await asyncio.sleep(RETRY_S)


class SqlWorld(World):
    """Clients, lines and faults as in `World`; the effect is a transfer in a database."""

    kinds = (
        "crash", "pause", "cancel", "outage", "network", "failure", "line", "hang_up", "reaper",
    )  # fmt: skip

    def __init__(self, seed: int, handler: type[Any]) -> None:
        self.handler = handler
        super().__init__(seed, SQL)
        self.database = Database(self.server, self.promises.wrong)
        self.promises.database = self.database
        weather = self.network.weather
        self.wire = Network(self.loop, Weather(weather.request_lost, weather.reply_lost))
        self.wire.faulted = self.faulted
        self.wire.arrived = self.arrived

    def _draw_rule(self) -> tuple[Rule, str]:
        return Rule(lease=LEASE_S, max_run=3 * LEASE_S), "release"

    def _promises(self) -> Any:
        return Books(self.server)

    def door(self) -> Any:
        return self.handler(self)

    def _calm_down(self) -> None:
        super()._calm_down()
        self.wire.weather, self.wire.can_be_cut = Weather(), False

    def _accept(self, line: Any, subject: Subject, content: Content, calm: bool) -> None:
        super()._accept(line, subject, content, calm)
        self.promises.came_s[line.arrival] = self.loop.clock_s

    def _strike(self, process: Process) -> None:
        if "reaper" in self._faults and self.chance() < 0.3 and not self.quiet:
            self.hit("reaped")
            self.handler.reap(self.database)
        super()._strike(process)

    async def transfer(self, session: Session, arrival: Arrival) -> Answer:
        """The effect: two rows that belong together."""
        arrival.ran = True
        self.loop.note("handler", arrival.id)
        await asyncio.sleep(self._work_s(arrival))
        await session.run("enter", arrival.subject.place, "debit", arrival.id)
        await asyncio.sleep(self._work_s(arrival))
        if not arrival.calm and "failure" in self._faults and self.chance() < 0.3:
            arrival.raised = HandlerError(f"{arrival.id} raised")
            raise arrival.raised
        await session.run("enter", arrival.subject.place, "credit", arrival.id)
        arrival.made = self._make(arrival, 201, "plain")
        return arrival.made


# --- the door -----------------------------------------------------------------------------------


class SqlStore:
    """What the door is given: a ledger of its own, or one that ends with a session."""

    def ledger(self, colour: Any) -> Any:
        return getattr(HOST.get(), "ledger", None)

    def bind(self, session: Session, *, commit: bool) -> Any:
        assert commit
        return _Bound(BoundModel(self.ledger(ASYNC), session))

    def close(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


@dataclass(frozen=True)
class _Bound:
    bound: Any

    def ledger(self, colour: Any) -> Any:
        return self.bound


class BoundModel:
    """The promises of a bound ledger: the record is committed with the session, or neither is."""

    def __init__(self, ledger: LockedLedger, session: Session) -> None:
        self._ledger = ledger
        self._session = session
        self._sent = False
        self._ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    async def complete(self, claim: Any, outcome: Any) -> Any:
        return await ASYNC.shield(self._complete(Completing(claim, outcome)))

    async def _complete(self, op: Completing) -> Any:
        if self._sent:
            return await self._resolve(op)
        if self._ended:  # a record in the next transaction would be one without its rows
            raise StoreUnavailableError("nothing has happened", again=False)
        try:
            if not await self._session.run("record", op):
                await self._undo()
                return await self._refused(op)
            self._sent = True
            await self._session.commit()
        except LostConnectionError as error:
            if self._sent:
                return await self._resolve(op)
            self._ended = True
            with contextlib.suppress(StoreUnavailableError):  # then its lease has to run out
                await self._ledger.release(op.claim, error="its transaction was lost")
            raise StoreUnavailableError("nothing has happened", again=False) from error
        return Kept()

    async def _refused(self, op: Completing) -> Any:
        """Who has it now. Its own rows are gone: not to know that does not make it happen."""
        server = self._ledger.server
        try:
            row = await self._ledger.ask(lambda: server.row(op.claim.key.id))
        except StoreUnavailableError as error:
            raise StoreUnavailableError("nothing has happened", again=False) from error
        return rules.complete(row, op, server.now_us())[0]

    async def _resolve(self, op: Completing) -> Any:
        """The record went with the commit, so the record is asked."""
        await self._undo()
        while True:
            try:
                verdict = await self._ledger.release(op.claim, error="not committed")
                break
            except StoreUnavailableError:
                await asyncio.sleep(RETRY_S)
        if isinstance(verdict, Kept):
            raise StoreUnavailableError("nothing has happened", again=False)
        return Kept() if verdict.outcome == op.outcome else verdict

    async def release(self, claim: Any, *, error: str | None = None) -> Any:
        await self._undo()
        return await self._ledger.release(claim, error=error)

    async def renew(self, claim: Any, *, lease_s: float | None = None) -> Any:
        if lease_s == 0:
            await self._undo()
        return await self._ledger.renew(claim, lease_s=lease_s)

    async def _undo(self) -> None:
        self._ended = True
        try:
            await self._session.rollback()
        except LostConnectionError:
            self._session.drop()


class Door:
    """The real door; its handler binds the session it writes to."""

    def __init__(self, world: SqlWorld) -> None:
        self._world = world
        store: Any = SqlStore()
        self._door = IdempotencyMiddleware(
            self._handler, scope=tenant_of, store=store, rule=world.rule
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._door(scope, receive, send)

    async def _handler(self, scope: Any, receive: Any, send: Any) -> None:
        arrival, session = REQUEST.get(), Session(self._world)
        await receive()
        try:
            attempt = attempt_of(scope)
            assert attempt is not None
            attempt.bind(session)
            made = await self._world.transfer(session, arrival)
            start = {"type": "http.response.start", "status": made.status}
            await send({**start, "headers": list(made.headers)})
            await send({"type": "http.response.body", "body": made.body})
        finally:
            session.drop()

    @staticmethod
    def reap(database: Database) -> None:
        """The ledger sweeps itself."""


# --- runs ---------------------------------------------------------------------------------------


SQL = Plant(server=LockingServer, ledger=LockedLedger)


def run_seed(seed: int, handler: type[Any] = Door) -> Report:
    return run_world(SqlWorld(seed, handler), seed, SQL)


if __name__ == "__main__":
    sys.exit(main(run_seed))
