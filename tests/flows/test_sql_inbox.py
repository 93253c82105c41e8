"""What handlers may do with the session that an SQL inbox gives them, and what it costs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from semel.errors import SettingsError, StoreUnavailableError
from semel.inbox import PoisonError, SQLInbox
from semel.outbox import Event, Outbox
from semel.parked import Parked
from semel.stores.sql import SQLStore
from semel.stores.sql.inbox_flow import ROUNDS
from semel.stores.sql.inbox_words import Words
from semel.stores.sql.lines import parse, with_driver
from semel.stores.sql.links import PsycopgLink
from semel.testing.inboxes import ALL, endings, message, messages
from support.inbox_bench import INSERT, close, database, file_database


@pytest.fixture(scope="module")
def postgres_bench(postgres_server):
    with database(postgres_server) as bench:
        yield bench


@pytest.fixture(scope="module")
def mariadb_bench(mariadb_server):
    with database(mariadb_server) as bench:
        yield bench


@pytest.fixture(scope="module")
def sqlite_bench(tmp_path_factory):
    with file_database(tmp_path_factory.mktemp("inbox")) as bench:
        yield bench


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def bench(request):
    return request.getfixturevalue(f"{request.param}_bench")


@pytest.fixture
def consumer():
    return f"stock-{uuid.uuid4().hex[:12]}"


@contextlib.asynccontextmanager
async def opened(bench, kind="url", **settings):
    inbox = bench.open(kind, **settings)
    try:
        yield inbox
    finally:
        await close(inbox)


def says(consumer, each):
    return {"said": f"{consumer} {each.aggregate_id}:{each.seq or each.id}"}


def effects(bench, consumer):
    found = [said.split(" ") for said in bench.effects()]
    return [said for whose, said in found if whose == consumer]


class Both:
    """Handlers of both colours, by the type of the message; each writes, then does what it is told.

    `does` takes the session; what it raises is the handler's.
    """

    def __init__(self, consumer, does=None):
        self.consumer, self.does = consumer, does or {}

    def colour(self, each):
        return "sync" if each.type == "sync" else "async"

    def __call__(self, each, session):
        return (self.sync if each.type == "sync" else self.on_the_loop)(each, session)

    def sync(self, each, session):
        session.execute(INSERT, says(self.consumer, each))
        if each.id in self.does:
            self.does[each.id](session)

    async def on_the_loop(self, each, session):
        await session.execute(INSERT, says(self.consumer, each))
        if each.id in self.does:
            await self.does[each.id](session)


def of_colour(colour, *seqs, aggregate="7"):
    return [message(seq, aggregate, type=colour) for seq in seqs]


async def held(inbox, consumer):
    """The errors of what waits, by id."""
    found = await Parked(inbox).list(consumer=consumer)
    return {each.head.message.id: each.head.error for each in found}


# --- what it costs ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_hundred_messages_are_two_statements_and_a_commit(postgres_bench, consumer, kind):
    said = []
    batch = [message(seq, str(n), type=kind) for seq in (1, 2) for n in range(50)]
    async with opened(postgres_bench, kind) as inbox:
        engine = inbox.store.engine_or_url
        sync = engine if kind == "sync" else engine.sync_engine
        await inbox.apply(consumer, of_colour(kind, 1, aggregate="x"), Both(consumer))  # connects
        event.listen(sync, "before_cursor_execute", lambda *args: said.append(args[2]))
        event.listen(sync, "commit", lambda _: said.append("COMMIT"))
        assert endings(await inbox.apply(consumer, batch, Both(consumer))) == ["applied"] * 100
        ours = [each for each in said if "INSERT INTO effect" not in each]
        assert [each.split(" ")[0] for each in ours] == ["SELECT", "INSERT", "COMMIT"]
        said.clear()
        alone = [message(None, id=str(n), type=kind) for n in range(100)]
        assert endings(await inbox.apply(consumer, alone, Both(consumer))) == ["applied"] * 100
        ours = [each for each in said if "INSERT INTO effect" not in each]
        assert [each.split(" ")[0] for each in ours] == ["SELECT", "INSERT", "COMMIT"]
        said.clear()
        await inbox.apply(consumer, batch, Both(consumer))
        assert [each.split(" ")[0] for each in said] == ["SELECT", "COMMIT"]


async def test_looking_for_what_is_due_is_one_statement(postgres_bench, consumer, monkeypatch):
    said = []
    fetch = PsycopgLink.fetch

    def told(self, statement, params=()):
        said.append(statement)
        return fetch(self, statement, params)

    monkeypatch.setattr(PsycopgLink, "fetch", told)
    monkeypatch.setattr(PsycopgLink, "change", None)
    async with opened(postgres_bench, "sync") as inbox:
        assert list(await inbox.retry(consumer, ALL, Both(consumer))) == []
    assert len(said) == 1


# --- whose session it is ------------------------------------------------------------------------


def committed(session):
    session.commit()


async def committed_async(session):
    await session.commit()


def committed_by_text(session):
    session.execute(sa.text("COMMIT"))


async def committed_by_text_async(session):
    await session.execute(sa.text("COMMIT"))


@pytest.mark.parametrize("how", ["verb", "text"])
@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_a_handler_that_commits_is_refused(bench, consumer, colour, how):
    wrong = {
        ("sync", "verb"): committed,
        ("async", "verb"): committed_async,
        ("sync", "text"): committed_by_text,
        ("async", "text"): committed_by_text_async,
    }[colour, how]
    handle = Both(consumer, {"orders-7-2": wrong})
    batch = of_colour(colour, 1, 2, 3) + of_colour(colour, 1, aggregate="8")
    async with opened(bench) as inbox:
        done = endings(await inbox.apply(consumer, batch, handle))
        assert done == ["applied", "retry", "behind", "applied"]
        assert "must not commit" in (await held(inbox, consumer))["orders-7-2"]
    assert effects(bench, consumer) == ["7:1", "8:1"]


def rolled_back(session):
    session.rollback()


def closed(session):
    session.close()


async def rolled_back_async(session):
    await session.rollback()


async def closed_async(session):
    await session.close()


@pytest.mark.parametrize("wrong", [rolled_back, closed, rolled_back_async, closed_async])
async def test_a_handler_that_ends_the_transaction_takes_nobody_along(bench, consumer, wrong):
    colour = "async" if wrong.__name__.endswith("async") else "sync"
    handle = Both(consumer, {"orders-7-2": wrong})
    batch = of_colour(colour, 1, 2, 3) + of_colour(colour, 1, aggregate="8")
    async with opened(bench) as inbox:
        done = endings(await inbox.apply(consumer, batch, handle))
        assert done == ["applied", "retry", "behind", "applied"]
        assert "ended" in (await held(inbox, consumer))["orders-7-2"].lower()
    assert effects(bench, consumer) == ["7:1", "8:1"]


@pytest.fixture
def unique(bench):
    name = f"u_{uuid.uuid4().hex[:8]}"
    bench.do(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY)", f"INSERT INTO {name} VALUES (1)")
    return name


def test_what_a_handler_swallows_is_not_taken_for_an_effect(bench, consumer, unique):
    """PostgreSQL would answer the COMMIT with a ROLLBACK, and nobody would be told."""

    def swallows(session):
        with contextlib.suppress(sa.exc.IntegrityError):
            session.execute(sa.text(f"INSERT INTO {unique} VALUES (1)"))

    async def go():
        handle = Both(consumer, {"orders-7-1": swallows})
        batch = of_colour("sync", 1, 2) + of_colour("sync", 1, aggregate="8")
        async with opened(bench, "sync") as inbox:
            return endings(await inbox.apply(consumer, batch, handle)), await held(inbox, consumer)

    done, errors = asyncio.run(go())
    if bench.name == "postgresql":
        assert done == ["retry", "behind", "applied"]
        assert "transaction" in errors["orders-7-1"]
        assert effects(bench, consumer) == ["8:1"]
    else:  # there, a statement that failed leaves the others alone
        assert done == ["applied"] * 3


async def test_a_handler_may_fail_in_a_savepoint_of_its_own(bench, consumer, unique):
    async def tries(session):
        with contextlib.suppress(sa.exc.IntegrityError):
            async with session.begin_nested():
                await session.execute(sa.text(f"INSERT INTO {unique} VALUES (1)"))

    handle = Both(consumer, {"orders-7-1": tries})
    async with opened(bench, "async") as inbox:
        done = endings(await inbox.apply(consumer, of_colour("async", 1, 2), handle))
    assert done == ["applied", "applied"]
    assert effects(bench, consumer) == ["7:1", "7:2"]


class Base(DeclarativeBase):
    pass


class Thing(Base):
    __tablename__ = "thing"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


async def test_objects_that_are_sent_late_fail_for_their_own_message(bench, consumer):
    Base.metadata.drop_all(bench.engine)
    Base.metadata.create_all(bench.engine)

    def handle(each, session):
        session.add(Thing(id=each.data["n"]))

    async with opened(bench, "sync") as inbox:
        batch = [message(1, "1", payload='{"n": 1}'), message(1, "2", payload='{"n": 1}')]
        batch += [message(1, "3", payload='{"n": 3}'), message(1, "4", payload='{"n": 4}')]
        done = endings(await inbox.apply(consumer, batch, handle))
        assert done == ["applied", "retry", "applied", "applied"]
        [error] = (await held(inbox, consumer)).values()
        assert "IntegrityError" in error
    with Session(bench.engine) as session:
        assert sorted(session.scalars(sa.select(Thing.id))) == [1, 3, 4]


async def test_what_the_commit_refuses_is_one_messages_fault(postgres_bench, consumer):
    """A constraint that is looked at only then: nothing says whose rows violate it."""
    name = f"d_{uuid.uuid4().hex[:8]}"
    postgres_bench.do(
        f"CREATE TABLE {name} (id INTEGER UNIQUE DEFERRABLE INITIALLY DEFERRED)",
        f"INSERT INTO {name} VALUES (1)",
    )

    async def doubles(session):
        await session.execute(sa.text(f"INSERT INTO {name} VALUES (1)"))

    handle = Both(consumer, {"orders-7-2": doubles})
    batch = of_colour("async", 1, 2, 3) + of_colour("async", 1, aggregate="8")
    async with opened(postgres_bench, "async") as inbox:
        done = endings(await inbox.apply(consumer, batch, handle))
        assert done == ["applied", "retry", "behind", "applied"]
        assert "duplicate key" in (await held(inbox, consumer))["orders-7-2"]
        handle.does.clear()
        await asyncio.to_thread(postgres_bench.age, 3600)
        assert endings(await inbox.retry(consumer, ALL, handle)) == ["2 applied", "3 applied"]
    assert effects(postgres_bench, consumer) == ["7:1", "8:1", "7:2", "7:3"]


async def test_events_of_a_handler_are_there_exactly_when_its_effect_is(bench, consumer):
    outbox = Outbox()

    def tells(session):
        outbox.add(session, Event("done", "order", consumer, {}, topic="done"))

    def tells_and_fails(session):
        tells(session)
        raise PoisonError("bad")

    def tells_twice(session):
        for total in (1, 2):
            outbox.add(session, Event("done", "order", "1", total, topic="done", id=consumer))

    does = {"orders-1-1": tells, "orders-2-1": tells_and_fails, "orders-3-1": tells_twice}
    batch = [message(1, str(n), type="sync") for n in range(1, 5)]
    async with opened(bench, "sync") as inbox:
        done = endings(await inbox.apply(consumer, batch, Both(consumer, does)))
        assert done == ["applied", "poison", "retry", "applied"]
    assert effects(bench, consumer) == ["1:1", "4:1"]
    select = f"SELECT count(*) FROM event_outbox WHERE aggregate_id = '{consumer}'"
    assert bench.rows(select) == [(1,)]


# --- what only looks like an outage -------------------------------------------------------------

TROUBLES = {
    "a backend that ends": "SELECT pg_terminate_backend(pg_backend_pid())",
    "a serialization failure": "DO $$ BEGIN RAISE 'always' USING ERRCODE = '40001'; END $$",
    "a read-only transaction": "SET TRANSACTION READ ONLY",
}


async def rounds(inbox, consumer, batch, handle):
    """As a worker does: the same batch, again after an outage; how it ended, and after how many."""
    for turn in range(20):
        try:
            return endings(await inbox.apply(consumer, batch, handle)), turn
        except StoreUnavailableError:
            assert await held(inbox, consumer) == {}
    pytest.fail("an outage without end")


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("trouble", TROUBLES)
async def test_trouble_of_one_message_that_lasts_is_its_failure(
    postgres_bench, consumer, trouble, colour
):
    statement = sa.text(TROUBLES[trouble])

    def sync(session):
        session.execute(statement)
        session.execute(INSERT, {"said": "never"})

    async def on_the_loop(session):
        await session.execute(statement)
        await session.execute(INSERT, {"said": "never"})

    handle = Both(consumer, {"orders-7-1": sync if colour == "sync" else on_the_loop})
    batch = [message(1, aggregate, type=colour) for aggregate in ("6", "7", "8")]
    async with opened(postgres_bench, colour) as inbox:
        done, turns = await rounds(inbox, consumer, batch, handle)
        assert done == ["applied", "retry", "applied"]
        assert turns == ROUNDS
        assert list(await held(inbox, consumer)) == ["orders-7-1"]
    assert effects(postgres_bench, consumer) == ["6:1", "8:1"]


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")  # as everywhere but here
async def test_a_connection_that_a_handler_breaks_and_says_nothing_is_its_failure(
    postgres_bench, consumer
):
    def ends(session):
        with contextlib.suppress(Exception):
            session.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))

    handle = Both(consumer, {"orders-7-1": ends})
    batch = [message(1, aggregate, type="sync") for aggregate in ("7", "8")]
    async with opened(postgres_bench, "sync") as inbox:
        done, _ = await rounds(inbox, consumer, batch, handle)
        assert done == ["retry", "applied"]


async def test_a_lock_that_a_handler_holds_against_itself_is_its_failure(postgres_bench, consumer):
    """And again where it waits: there it is counted as another attempt."""
    other = sa.create_engine(with_driver(parse(postgres_bench.url), "sync"))

    def locked(session):
        session.execute(sa.text("LOCK TABLE effect IN EXCLUSIVE MODE"))
        with other.begin() as second:
            second.execute(sa.text("SET LOCAL lock_timeout = '5ms'"))
            second.execute(INSERT, {"said": "never"})

    handle = Both(consumer, {"orders-7-1": locked})
    async with opened(postgres_bench, "sync") as inbox:
        batch = [message(1, aggregate, type="sync") for aggregate in ("7", "8")]
        done, _ = await rounds(inbox, consumer, batch, handle)
        assert done == ["retry", "applied"]
        await asyncio.to_thread(postgres_bench.age, 3600)
        for _ in range(ROUNDS):
            with pytest.raises(StoreUnavailableError, match="lock"):
                await inbox.retry(consumer, ALL, handle)
        assert endings(await inbox.retry(consumer, ALL, handle)) == ["1 retry"]
        [sequence] = await Parked(inbox).list(consumer=consumer)
        assert sequence.head.attempts == 2
    other.dispose()


@pytest.mark.parametrize("singly", [False, True])
async def test_a_pool_that_a_handler_empties_by_itself_is_its_failure(
    sqlite_bench, consumer, singly
):
    pool = sa.create_engine("sqlite://", poolclass=sa.QueuePool, pool_size=1, max_overflow=0)
    pool.pool._timeout = 0.01

    def empty(session):
        with pool.connect(), pool.connect():
            pass

    handle = Both(consumer, {"orders-7-1": empty})
    async with opened(sqlite_bench, "sync") as inbox:
        for _ in range(ROUNDS):
            with pytest.raises(StoreUnavailableError):
                await inbox.apply(consumer, of_colour("sync", 1), handle, singly=singly)
        done = await inbox.apply(consumer, of_colour("sync", 1), handle, singly=singly)
        assert endings(done) == ["retry"]
    pool.dispose()


async def test_a_statement_too_large_for_the_server_is_its_failure(mariadb_bench, consumer):
    def large(session):
        session.execute(INSERT, {"said": "x" * 17_000_000})

    handle = Both(consumer, {"orders-7-1": large})
    batch = [message(1, aggregate, type="sync") for aggregate in ("7", "8")]
    async with opened(mariadb_bench, "sync") as inbox:
        done, _ = await rounds(inbox, consumer, batch, handle)
        assert done == ["retry", "applied"]


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")  # as everywhere but here
async def test_a_handler_that_commits_below_its_session_holds_up_nobody(bench, consumer):
    handle = Both(consumer, {"orders-7-1": lambda session: session.connection().commit()})
    batch = [message(1, aggregate, type="sync") for aggregate in ("6", "7", "8")]
    async with opened(bench, "sync") as inbox:
        done = endings(await inbox.apply(consumer, batch, handle))
        assert done == ["applied", "retry", "applied"]
        assert "must not commit" in (await held(inbox, consumer))["orders-7-1"]
    assert effects(bench, consumer) == ["6:1", "8:1"]


async def test_an_outage_of_the_database_is_waited_for_however_long_it_takes(
    postgres_bench, consumer, monkeypatch
):
    """Handlers meet it first, round after round; the database itself does not answer either."""

    def ends(session):
        session.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))

    async def silent(self, link):
        raise StoreUnavailableError("down")

    handle = Both(consumer, {"orders-7-1": ends})
    async with opened(postgres_bench, "sync") as inbox:
        with monkeypatch.context() as outage:
            outage.setattr(Words, "now_us", silent)
            for _ in range(3 * ROUNDS):
                with pytest.raises(StoreUnavailableError):
                    await inbox.apply(consumer, of_colour("sync", 1), handle)
        for _ in range(ROUNDS - 1):  # one that comes and goes begins to count anew
            with pytest.raises(StoreUnavailableError):
                await inbox.apply(consumer, of_colour("sync", 1), handle)
        assert await held(inbox, consumer) == {}
        handle.does.clear()
        done = await inbox.apply(consumer, of_colour("sync", 1), handle)
        assert endings(done) == ["applied"]


async def test_an_outage_that_a_handler_tells_of_is_waited_for_however_long_it_takes(
    sqlite_bench, consumer
):
    def down(session):
        raise StoreUnavailableError("the provider is down")

    handle = Both(consumer, {"orders-7-1": down})
    async with opened(sqlite_bench, "sync") as inbox:
        for singly in (False, True):
            for _ in range(3 * ROUNDS):
                with pytest.raises(StoreUnavailableError, match="provider"):
                    await inbox.apply(consumer, of_colour("sync", 1), handle, singly=singly)
        assert await held(inbox, consumer) == {}


# --- trouble that is nobody's fault -------------------------------------------------------------


@pytest.mark.parametrize("database_name", ["postgres", "mariadb"])
async def test_a_deadlock_is_held_against_nobody(request, consumer, database_name):
    bench = request.getfixturevalue(f"{database_name}_bench")
    name = f"l_{uuid.uuid4().hex[:8]}"
    bench.do(
        f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, n INTEGER)",
        f"INSERT INTO {name} VALUES (1, 0), (2, 0)",
    )
    meeting = asyncio.Barrier(2)
    met = []

    def crosswise(first, second):
        async def update(each, session):
            bump = sa.text(f"UPDATE {name} SET n = n + 1 WHERE id = :id")
            await session.execute(bump, {"id": first})
            if len(met) < 2:
                met.append(first)
                await meeting.wait()
            await session.execute(bump, {"id": second})

        return update

    async with opened(bench, "async") as one, opened(bench, "async") as other:
        both = await asyncio.gather(
            one.apply(consumer, messages(1, aggregate="1"), crosswise(1, 2)),
            other.apply(consumer, messages(1, aggregate="2"), crosswise(2, 1)),
        )
        assert [endings(each) for each in both] == [["applied"], ["applied"]]
        assert await held(one, consumer) == {}
    assert bench.rows(f"SELECT n FROM {name} ORDER BY id") == [(2,), (2,)]


async def test_one_with_much_to_do_is_not_overtaken_for_ever(postgres_bench, consumer):
    """A sequence is drained, message by message, while a slow batch wants to put one behind it."""
    many = 250
    handle = Both(consumer, {"orders-7-1": None})
    async with opened(postgres_bench, "async") as one, opened(postgres_bench, "async") as other:
        await one.apply(consumer, of_colour("async", *range(1, many)), handle)
        handle.does.clear()
        [sequence] = await Parked(one).list(consumer=consumer)
        await Parked(one).replay(sequence.sequence)

        async def slow(each, session):
            await handle(each, session)
            await asyncio.sleep(0.005)

        drained = asyncio.create_task(one.retry(consumer, ALL, handle))
        batch = [message(many), *(message(seq, "8") for seq in range(1, 21))]
        assert endings(await other.apply(consumer, batch, slow)) == ["behind"] + ["applied"] * 20
        assert not drained.done()
        await drained
        await one.retry(consumer, ALL, handle)
    mine = [each for each in effects(postgres_bench, consumer) if each.startswith("7:")]
    assert mine == [f"7:{seq}" for seq in range(1, many + 1)]


async def test_a_lock_that_stays_is_an_outage(postgres_bench, consumer):
    def impatient(each, session):
        session.execute(sa.text("SET LOCAL lock_timeout = '50ms'"))
        session.execute(sa.text("LOCK TABLE effect IN EXCLUSIVE MODE"))

    async with opened(postgres_bench, "sync") as inbox:
        with postgres_bench.engine.connect() as connection:
            own = connection.execution_options(isolation_level="READ COMMITTED")
            with own.begin():
                own.execute(sa.text("LOCK TABLE effect IN EXCLUSIVE MODE"))
                with pytest.raises(StoreUnavailableError, match="lock"):
                    await inbox.apply(consumer, messages(1), impatient)
        assert endings(await inbox.apply(consumer, messages(1), impatient)) == ["applied"]


async def test_an_outage_that_a_handler_wraps_is_one(bench, consumer):
    def handle(each, session):
        try:
            raise StoreUnavailableError("the other store is down")
        except StoreUnavailableError as error:
            raise RuntimeError("cannot") from error

    async with opened(bench, "sync") as inbox:
        with pytest.raises(StoreUnavailableError, match="cannot"):
            await inbox.apply(consumer, messages(1), handle)
        assert await held(inbox, consumer) == {}


@pytest.mark.timeout(30)
async def test_an_error_raised_from_itself_is_a_failure_like_others(sqlite_bench, consumer):
    def handle(each, session):
        error = ValueError("wrong")
        raise error from error

    async with opened(sqlite_bench, "sync") as inbox:
        assert endings(await inbox.apply(consumer, messages(1), handle)) == ["retry"]


async def test_an_error_that_cannot_say_what_it_is_is_a_failure_like_others(bench, consumer):
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError("no")

    def mute(session):
        raise MuteError

    handle = Both(consumer, {"orders-7-1": mute})
    batch = [message(1, aggregate, type="sync") for aggregate in ("7", "8")]
    async with opened(bench, "sync") as inbox:
        for singly in (False, True):
            done = await inbox.apply(f"{consumer}-{singly}", batch, handle, singly=singly)
            assert endings(done) == ["retry", "applied"]


async def test_a_table_that_a_handler_misses_is_its_own_trouble(bench, consumer):
    def handle(each, session):
        session.execute(sa.text("INSERT INTO no_such_table VALUES (1)"))

    async with opened(bench, "sync") as inbox:
        assert endings(await inbox.apply(consumer, messages(1), handle)) == ["retry"]
        assert "no_such_table" in (await held(inbox, consumer))["orders-7-1"]


async def test_a_handler_that_waits_for_itself_is_told(sqlite_bench, consumer):
    """For ever, if it were taken for passing trouble: its own transaction has the only writer."""
    engine = sa.create_engine(
        with_driver(parse(sqlite_bench.url), "sync"), connect_args={"timeout": 0.1}
    )

    def handle(each, session):
        if each.aggregate_id == "7":
            with Session(engine) as other:
                other.execute(INSERT, says(consumer, each))
                other.commit()

    async with opened(sqlite_bench, "sync") as inbox:
        done = endings(await inbox.apply(consumer, [message(1), message(1, "8")], handle))
        assert done == ["retry", "applied"]
        assert "a file of its own" in (await held(inbox, consumer))["orders-7-1"]
    engine.dispose()


async def test_what_a_server_cannot_do_is_no_outage(postgres_bench, consumer):
    def handle(each, session):
        session.execute(sa.text("SELECT 1 FROM effect GROUP BY id FOR UPDATE"))  # 0A000

    async with opened(postgres_bench, "sync") as inbox:
        assert endings(await inbox.apply(consumer, messages(1), handle)) == ["retry"]


async def test_a_slow_batch_is_committed_in_parts(bench, consumer, monkeypatch):
    monkeypatch.setattr("semel.stores.sql.inbox_flow.MOST_OPEN_S", 0.0)
    stood = []

    def handle(each, session):
        stood.append(len(effects(bench, consumer)) if bench.name != "sqlite" else each.seq - 1)
        session.execute(INSERT, says(consumer, each))

    async with opened(bench, "sync") as inbox:
        assert endings(await inbox.apply(consumer, messages(1, 2, 3), handle)) == ["applied"] * 3
    assert stood == [0, 1, 2]
    assert bench.rows(f"SELECT turn FROM inbox_mark WHERE consumer = '{consumer}'") == [(3,)]


# --- effects elsewhere --------------------------------------------------------------------------


class Outside(Both):
    """Its effects are elsewhere, and it says so; unless the type of the message is "async"."""

    def __init__(self, consumer, bench):
        super().__init__(consumer)
        self.bench, self.ran, self.fails = bench, [], {}

    def outside(self, each):
        return each.type == "outside"

    async def on_the_loop(self, each, session):
        if each.type == "async":
            await super().on_the_loop(each, session)
            return
        assert session is None
        self.ran.append(each.id)
        # On SQLite this would wait for our own transaction, if there was one.
        await asyncio.to_thread(self.bench.do, "UPDATE effect SET said = said WHERE id = 0")
        if each.id in self.fails:
            raise self.fails[each.id]


@pytest.mark.parametrize("kind", ["url", "sync"])
async def test_effects_elsewhere_have_no_transaction_open(bench, consumer, kind):
    handle = Outside(consumer, bench)
    kinds = ["outside", "async", "outside"] if kind == "url" else ["outside"] * 3
    batch = [message(seq, type=each) for seq, each in enumerate(kinds, 1)]
    batch += [message(1, "8", type="outside"), message(None, id="u", type="outside")]
    handle.fails["orders-7-3"] = ValueError("not yet")
    async with opened(bench, kind) as inbox:
        done = endings(await inbox.apply(consumer, batch, handle))
        assert done == ["applied", "applied", "retry", "applied", "applied"]
        assert endings(await inbox.apply(consumer, batch, handle)) == [
            *("seen", "seen", "behind"),
            *("seen", "seen"),
        ]
        handle.fails.clear()
        await asyncio.to_thread(bench.age, 3600)
        assert endings(await inbox.retry(consumer, ALL, handle)) == ["3 applied"]
        handle.fails["orders-9-1"] = StoreUnavailableError("down")
        for singly in (False, True):
            with pytest.raises(StoreUnavailableError):
                await inbox.apply(
                    consumer, [message(1, "9", type="outside")], handle, singly=singly
                )
        handle.fails.clear()
        more = [message(1, "9", type="outside"), message(None, id="v", type="outside")]
        done = await inbox.apply(consumer, more, handle, singly=True)
        assert endings(done) == ["applied", "applied"]
    assert handle.ran.count("orders-7-1") == 1
    assert bench.rows(f"SELECT 1 FROM inbox_started WHERE consumer = '{consumer}'") == []


# --- colours ------------------------------------------------------------------------------------


async def test_an_inbox_by_url_serves_both_colours_in_order(bench, consumer):
    kinds = ["sync", "sync", "async", "sync", "async", "async"]
    batch = [message(seq, type=kind) for seq, kind in enumerate(kinds, 1)]
    handle = Both(consumer, {"orders-7-3": None})
    async with opened(bench) as inbox:
        done = endings(await inbox.apply(consumer, batch, handle))
        assert done == ["applied", "applied", "retry", "behind", "behind", "behind"]
        handle.does.clear()
        await asyncio.to_thread(bench.age, 3600)
        ran = endings(await inbox.retry(consumer, ALL, handle))
        assert ran == ["3 applied", "4 applied", "5 applied", "6 applied"]
    assert effects(bench, consumer) == [f"7:{seq}" for seq in range(1, 7)]


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_handler_of_the_other_colour_may_do_without_a_session(bench, consumer, kind):
    ran = []

    class Alone(Both):
        def sync(self, each, session):
            ran.append(each.id)
            if each.id == "orders-7-2":
                session.execute(INSERT, {"said": "x"})

        async def on_the_loop(self, each, session):
            await asyncio.sleep(0)
            self.sync(each, session)

    other = "async" if kind == "sync" else "sync"
    async with opened(bench, kind) as inbox:
        done = endings(await inbox.apply(consumer, of_colour(other, 1, 2), Alone(consumer)))
        assert done == ["applied", "retry"]
        assert "URL" in (await held(inbox, consumer))["orders-7-2"]
    assert ran[0] == "orders-7-1"


async def test_handlers_that_need_threads_get_them_while_ours_wait(sqlite_bench, consumer):
    class InThreads(Both):
        async def on_the_loop(self, each, session):
            await asyncio.to_thread(threading.get_ident)

    many = 40  # more than the loop has threads
    async with opened(sqlite_bench, "sync") as inbox:
        done = await asyncio.gather(
            *(
                inbox.apply(f"{consumer}-{n}", of_colour("async", 1), InThreads(consumer))
                for n in range(many)
            )
        )
    assert [endings(each) for each in done] == [["applied"]] * many


async def test_an_async_handler_is_not_called_with_a_sync_session(sqlite_bench, consumer):
    async def handle(each, session):
        await session.execute(INSERT, says(consumer, each))

    async with opened(sqlite_bench, "sync") as inbox:
        assert endings(await inbox.apply(consumer, messages(1), handle)) == ["retry"]
        assert "AsyncEngine" in (await held(inbox, consumer))["orders-7-1"]
        in_disguise = [message(1, "8")]
        done = await inbox.apply(consumer, in_disguise, lambda *given: handle(*given[:2]))
        assert endings(done) == ["retry"]
        assert "AsyncEngine" in (await held(inbox, consumer))["orders-8-1"]


async def test_a_plain_function_is_called_on_the_loop_by_an_async_inbox(sqlite_bench, consumer):
    async with opened(sqlite_bench, "async") as inbox:
        assert endings(await inbox.apply(consumer, messages(1), lambda m, s: None)) == ["applied"]


async def test_a_handler_that_cancels_itself_has_failed_and_stops_nobody(bench, consumer):
    async def handle(each, session):
        if each.aggregate_id == "7":
            raise asyncio.CancelledError

    batch = [message(1), message(1, "8")]
    async with opened(bench, "async") as inbox:
        assert endings(await inbox.apply(consumer, batch, handle)) == ["retry", "applied"]


async def test_a_stop_iteration_is_an_error_like_others(sqlite_bench, consumer):
    def handle(each, session):
        next(iter([]))

    for kind in ("sync", "async"):
        async with opened(sqlite_bench, kind) as inbox:
            done = await inbox.apply(f"{consumer}-{kind}", messages(1), handle)
            assert endings(done) == ["retry"]


def test_one_inbox_serves_one_loop_after_another(bench, consumer):
    inbox = SQLInbox(bench.url)

    async def go(seq):
        return endings(await inbox.apply(consumer, of_colour("async", seq), Both(consumer)))

    for seq in (1, 2, 3):
        assert asyncio.run(go(seq)) == ["applied"]
    asyncio.run(inbox.aclose())


# --- sessions of one's own ----------------------------------------------------------------------


class MySession(Session):
    pass


class MyAsyncSession(AsyncSession):
    pass


async def test_sessions_are_made_as_told(bench, consumer):
    made = []

    def handle(each, session):
        made.append(type(session))
        session.execute(INSERT, says(consumer, each))

    async def handle_async(each, session):
        made.append(type(session))
        await session.execute(INSERT, says(consumer, each))

    for kind in ("sync", "url"):
        async with opened(bench, kind, session=sessionmaker(class_=MySession)) as inbox:
            of_both = Both(consumer)
            of_both.sync = handle
            await inbox.apply(f"{consumer}-{kind}", of_colour("sync", 1), of_both)
    for kind in ("async", "url"):
        factory = async_sessionmaker(class_=MyAsyncSession)
        async with opened(bench, kind, session=factory) as inbox:
            await inbox.apply(f"{consumer}-{kind}-a", messages(1), handle_async)
    assert all(issubclass(each, MySession) for each in made[:2])
    assert made[2:] == [MyAsyncSession, MyAsyncSession]


async def test_a_session_may_be_used_again_and_is_its_owners_in_between(sqlite_bench, consumer):
    engine = sa.create_engine(
        with_driver(parse(sqlite_bench.url), "sync"), connect_args={"check_same_thread": False}
    )
    session = Session(engine)
    inbox = SQLInbox(engine, session=lambda: session)
    for seq in (1, 2):
        done = await inbox.apply(consumer, of_colour("sync", seq), Both(consumer))
        assert endings(done) == ["applied"]
        session.execute(INSERT, {"said": f"{consumer} own:{seq}"})
        session.commit()
    assert effects(sqlite_bench, consumer) == ["7:1", "own:1", "7:2", "own:2"]
    session.close()
    await close(inbox)


async def test_a_factory_that_cannot_fit_is_refused(sqlite_bench, consumer):
    for kind, factory in (
        ("sync", async_sessionmaker()),
        ("async", sessionmaker()),
        ("url", lambda: None),
    ):
        with pytest.raises(SettingsError, match="session"):
            await close(sqlite_bench.open(kind, session=factory))
    async with opened(sqlite_bench, "sync", session=lambda: 3) as inbox:
        with pytest.raises(SettingsError, match="made a int"):
            await inbox.apply(consumer, messages(1), lambda m, s: None)
    async with opened(sqlite_bench, "sync", session=Session) as inbox:
        with pytest.raises(SettingsError, match="bind"):
            await inbox.apply(consumer, messages(1), lambda m, s: None)


async def test_an_engine_without_transactions_is_refused(bench, consumer):
    engine = sa.create_engine(with_driver(parse(bench.url), "sync"), isolation_level="AUTOCOMMIT")
    inbox = SQLInbox(engine)
    with pytest.raises(SettingsError, match="AUTOCOMMIT"):
        await inbox.apply(consumer, messages(1), lambda m, s: None)
    await close(inbox)


@pytest.mark.parametrize("colour", ["sync", "async"])
@pytest.mark.parametrize("database", ["postgres", "mariadb"])
async def test_a_driver_that_commits_by_itself_is_refused(request, consumer, database, colour):
    bench = request.getfixturevalue(f"{database}_bench")
    make = sa.create_engine if colour == "sync" else create_async_engine
    inbox = SQLInbox(make(with_driver(parse(bench.url), colour), connect_args={"autocommit": True}))
    with pytest.raises(SettingsError, match="autocommit mode"):
        await inbox.apply(consumer, of_colour(colour, 1), Both(consumer))
    assert effects(bench, consumer) == []
    await close(inbox)


async def test_a_file_whose_driver_begins_nothing_by_itself_is_taken(sqlite_bench, consumer):
    """The inbox begins its transactions there itself."""
    engine = sa.create_engine(with_driver(parse(sqlite_bench.url), "sync"))
    event.listen(engine, "connect", lambda driver, _: setattr(driver, "isolation_level", None))

    def fails(session):
        raise ValueError("after its effect")

    inbox = SQLInbox(engine)
    handle = Both(consumer, {"orders-7-1": fails})
    assert endings(await inbox.apply(consumer, of_colour("sync", 1), handle)) == ["retry"]
    assert effects(sqlite_bench, consumer) == []
    await close(inbox)


async def test_an_inbox_stands_on_what_a_store_stands_on(bench, consumer):
    engine = sa.create_engine(with_driver(parse(bench.url), "sync"))
    store = SQLStore(engine)
    inbox = SQLInbox(store)
    assert inbox.store is store
    done = await inbox.apply(consumer, of_colour("sync", 1), Both(consumer))
    assert endings(done) == ["applied"]
    await close(inbox)
    by_url = SQLInbox(SQLStore(bench.url))
    done = await by_url.apply(consumer, of_colour("async", 1, 2), Both(consumer))
    assert endings(done) == ["seen", "applied"]
    await by_url.aclose()


async def test_a_session_in_which_nothing_happens_is_ended_by_the_server(consumer, request):
    asks = {
        "postgres": "SELECT current_setting('idle_in_transaction_session_timeout')",
        "mariadb": "SELECT @@SESSION.idle_transaction_timeout",
    }
    for name, ask in asks.items():
        bench = request.getfixturevalue(f"{name}_bench")
        seen = []

        def handle(each, session, ask=ask, seen=seen):
            seen.append(str(session.scalar(sa.text(ask))))

        async with opened(bench, "sync", idle_s=7) as inbox:
            await inbox.apply(consumer, messages(1, 2), handle)
            with inbox.store.engine_or_url.connect() as connection:
                seen.append(str(connection.scalar(sa.text(ask))))
        assert seen[:2] == (["7s", "7s"] if name == "postgres" else ["7", "7"])
        assert seen[2] in {"0", "0s"}, "it is the application's connection again"
        async with opened(bench, "sync", idle_s=None) as inbox:
            await inbox.apply(consumer, messages(3), handle)
        assert seen[3] in {"0", "0s"}


@pytest.mark.parametrize("name", ["postgres", "mariadb"])
async def test_a_handler_that_idles_too_long_has_failed_and_holds_up_nobody(
    request, consumer, name
):
    """It is no outage: that would be tried for ever."""
    bench = request.getfixturevalue(f"{name}_bench")
    idle_s = 0.2 if name == "postgres" else 1

    async def idles(session):
        await asyncio.sleep(2 * idle_s)
        await session.execute(sa.text("SELECT 1"))

    handle = Both(consumer, {"orders-7-2": idles})
    batch = of_colour("async", 1, 2, 3) + of_colour("async", 1, aggregate="8")
    async with opened(bench, "async", idle_s=idle_s) as inbox:
        done = endings(await inbox.apply(consumer, batch, handle))
        assert done == ["applied", "retry", "behind", "applied"]
        assert "idle_s" in (await held(inbox, consumer))["orders-7-2"]
    assert effects(bench, consumer) == ["7:1", "8:1"]


async def test_connections_of_our_own_stay_as_they_were_made(mariadb_bench, consumer):
    seen = []
    ask = "SELECT @@SESSION.idle_transaction_timeout, @@SESSION.tx_isolation"

    async def handle(each, session):
        seen.append(tuple((await session.execute(sa.text(ask))).one()))

    async with opened(mariadb_bench, "url", idle_s=7) as inbox:
        for seq in (1, 2):
            await inbox.apply(consumer, messages(seq), handle)
            await inbox.retry(consumer, ALL, handle)
    assert seen == [(7, "READ-COMMITTED")] * 2


# --- tables -------------------------------------------------------------------------------------


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def empty_url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/empty.db"
    return request.getfixturevalue(f"{request.param}_url")


async def test_tables_that_are_missing_are_made_when_told(empty_url, consumer):
    refusing = SQLInbox(empty_url)
    for verb in (
        lambda: refusing.apply(consumer, messages(1), lambda m, s: None),
        lambda: refusing.retry(consumer, ALL, lambda m, s: None),
        lambda: refusing.baseline(consumer, "orders"),
    ):
        with pytest.raises(SettingsError, match="semel db init"):
            await verb()
    await refusing.aclose()
    inbox = SQLInbox(empty_url, create=True)
    assert endings(await inbox.apply(consumer, messages(1), lambda m, s: None)) == ["applied"]
    await inbox.aclose()
    again = SQLInbox(empty_url)
    assert list(await again.retry(consumer, ALL, lambda m, s: None)) == []
    await again.aclose()


async def test_the_first_thing_may_be_to_look_for_what_is_due(tmp_path, consumer):
    inbox = SQLInbox(f"sqlite:///{tmp_path}/empty.db", create=True)
    assert list(await inbox.retry(consumer, ALL, lambda m, s: None)) == []
    await inbox.aclose()


async def test_what_somebody_has_spoilt_by_hand_is_parked_and_shown(bench, consumer):
    handle = Both(consumer, {"orders-7-1": None, "orders-8-1": None})
    batch = of_colour("sync", 1, 2) + of_colour("sync", 1, aggregate="8")
    async with opened(bench, "sync") as inbox:
        await inbox.apply(consumer, batch, handle)
        handle.does.clear()
        bench.do(
            "UPDATE event_parked SET message = '{not json' "
            f"WHERE event_id = 'orders-7-1' AND consumer = '{consumer}'"
        )
        bench.age(3600)
        ran = endings(await inbox.retry(consumer, ALL, handle))
        assert sorted(ran) == ["1 applied", "1 poison"]
        assert "cannot be read" in (await held(inbox, consumer))["orders-7-1"]
        [sequence] = await Parked(inbox).list(consumer=consumer)
        assert "not json" in sequence.head.message.payload
        await Parked(inbox).edit(sequence.sequence, "orders-7-1", "{}")
        await Parked(inbox).replay(sequence.sequence)
        ran = endings(await inbox.retry(consumer, ALL, handle))
        assert ran == ["1 applied", "2 applied"]


async def test_two_engines_of_one_file_take_turns(tmp_path, consumer):
    """SQLite has one writer: who comes second waits, and then has seen it."""
    with file_database(tmp_path) as bench:
        batch = [message(seq, str(n), type="async") for seq in (1, 2) for n in range(10)]
        async with opened(bench, "async") as one, opened(bench, "async") as other:
            handle = Both(consumer)
            both = await asyncio.gather(
                one.apply(consumer, batch, handle), other.apply(consumer, batch, handle)
            )
        words = [set(pair) for pair in zip(*map(endings, both), strict=True)]
        assert words == [{"applied", "seen"}] * len(batch)
        assert len(effects(bench, consumer)) == len(batch)


def test_create_async_engine_is_what_an_async_inbox_is_given():
    with pytest.raises(SettingsError, match="Engine, an AsyncEngine or a URL"):
        SQLInbox(create_async_engine)
