"""`SqlAlchemyIdempotency`: get_response, lock, store_response, mark_failed, cleanup_expired."""

from __future__ import annotations

import asyncio
import gc
import inspect
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, create_async_engine
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.orm import sessionmaker as make_sessions

from semel import (
    ClaimLostError,
    DuplicateExecutionError,
    InProgressError,
    ResultLostError,
    SettingsError,
    StoreUnavailableError,
)
from semel.colour import SYNC, run
from semel.http.sqlalchemy import (
    IdempotencyConflictError,
    IdempotencyRecord,
    SqlAlchemyIdempotency,
    hash_request,
)
from semel.stores.memory import MemoryStore
from semel.stores.sql import NoTableError, SQLStore, init
from semel.stores.sql.lines import parse, with_driver

CHARGE = sa.text("INSERT INTO charge VALUES (40)")
ORDER = {"operation": "CreateOrder", "request_hash": "abc123"}

pytestmark = pytest.mark.timeout(60)


class Sync:
    """Sessions of the sync colour; a test awaits what it is given, whatever that is."""

    colour = "sync"
    close = staticmethod(Session.close)

    def __init__(self, url):
        self.url = url
        self.engine = self.connect(with_driver(parse(url), self.colour))
        self.sessions = []

    def connect(self, url):
        return sa.create_engine(url)

    def session(self):
        self.sessions.append(Session(self.engine))
        return self.sessions[-1]

    async def end(self):
        for session in self.sessions:
            session.close()
        self.engine.dispose()


class Async(Sync):
    colour = "async"

    def connect(self, url):
        return create_async_engine(url)

    def session(self):
        self.sessions.append(AsyncSession(self.engine))
        return self.sessions[-1]

    async def end(self):
        for session in self.sessions:
            await session.close()
        await self.engine.dispose()


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def url(request, tmp_path):
    if request.param == "sqlite":
        init(url := f"sqlite:///{tmp_path}/shop.db")
    else:
        url = request.getfixturevalue(f"{request.param}_tables_url")
    with engine_to(url).begin() as connection:
        connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS charge (amount INTEGER)")
    return url


on_one_database = pytest.mark.parametrize("url", ["sqlite"], indirect=True)


@pytest.fixture(params=[Sync, Async], ids=["sync", "async"])
async def shop(request, url):
    shop = request.param(url)
    yield shop
    await shop.end()


@pytest.fixture
def session(shop):
    return shop.session()


def engine_to(url):
    return sa.create_engine(with_driver(parse(url), "sync"), poolclass=sa.NullPool)


def charges(url):
    with engine_to(url).connect() as connection:
        return connection.exec_driver_sql("SELECT count(*) FROM charge").scalar_one()


async def of(answer):
    """What was answered, in either colour."""
    return await answer if inspect.isawaitable(answer) else answer


def lock(idempotency, key="order-1", **asked):
    return of(idempotency.lock(idempotency_key=key, **{**ORDER, **asked}))


def store(idempotency, key="order-1", response=None, status_code=201):
    given = {"id": 7, "total": "40.00"} if response is None else response
    return of(
        idempotency.store_response(idempotency_key=key, response=given, status_code=status_code)
    )


async def settled(session, idempotency, key="order-1", **answer):
    await lock(idempotency, key)
    await of(session.execute(CHARGE))
    await store(idempotency, key, **answer)
    await of(session.commit())


def record(url, key="order-1", tenant=""):
    store = SQLStore(url)
    try:
        named = {"tenant_id": tenant} if tenant else {}
        idempotency = SqlAlchemyIdempotency(Session(engine_to(url)), **named)
        return run(store.ledger(SYNC).look(idempotency._key(key).id))
    finally:
        store.close()


def age(url, column, key="order-1"):
    """As if this time had come long ago."""
    with engine_to(url).begin() as connection:
        connection.execute(
            sa.text(
                f"UPDATE idempotency SET {column} = '2020-01-01 00:00:00.000000' "
                "WHERE idempotency_key = :key"
            ),
            {"key": key},
        )


def is_a_day(span):
    return abs(span - timedelta(days=1)) < timedelta(seconds=5)


async def eventually(condition):
    while not await condition():
        await asyncio.sleep(0.02)


# --- the walk -----------------------------------------------------------------------------------


async def test_a_response_is_there_when_the_session_is_committed(url, shop, session):
    idempotency = SqlAlchemyIdempotency(session)
    assert await of(idempotency.get_response("order-1")) is None
    await lock(idempotency)
    assert await of(idempotency.get_response("order-1")) is None
    await of(session.execute(CHARGE))
    await store(idempotency)
    assert await of(SqlAlchemyIdempotency(shop.session()).get_response("order-1")) is None
    await of(session.commit())

    cached = await of(SqlAlchemyIdempotency(shop.session()).get_response("order-1"))
    assert (cached.response, cached.status_code) == ({"id": 7, "total": "40.00"}, 201)
    assert (cached.operation, cached.request_hash, cached.state) == (
        "CreateOrder",
        "abc123",
        "COMPLETED",
    )
    assert is_a_day(cached.expires_at - cached.completed_at)
    assert charges(url) == 1


async def test_a_second_request_is_told_at_once_that_the_first_is_running(url, shop, session):
    first, second = SqlAlchemyIdempotency(session), SqlAlchemyIdempotency(shop.session())
    await lock(first)
    await of(session.execute(CHARGE))
    await store(first)
    with pytest.raises(InProgressError) as caught:
        await lock(second)
    assert caught.value.retry_after > 1
    await of(session.commit())
    with pytest.raises(DuplicateExecutionError) as done:
        await lock(second)
    assert (done.value.result.response, done.value.result.status_code) == (
        {"id": 7, "total": "40.00"},
        201,
    )


async def test_what_failed_takes_its_rows_along_and_can_be_tried_again(url, shop, session):
    idempotency = SqlAlchemyIdempotency(session)
    await lock(idempotency)
    await of(session.execute(CHARGE))
    try:
        raise LookupError("no funds")
    except LookupError:
        await of(idempotency.mark_failed("order-1"))
    await of(session.commit())
    assert charges(url) == 0
    assert (record(url).state, record(url).error) == ("FAILED", "LookupError: no funds")
    assert await of(idempotency.get_response("order-1")) is None
    await settled(session, idempotency)
    assert (charges(url), record(url).number) == (1, 2)


async def test_a_failed_statement_does_not_keep_the_key(url, session):
    idempotency = SqlAlchemyIdempotency(session)
    await lock(idempotency)
    await of(session.execute(CHARGE))
    with pytest.raises(sa.exc.SQLAlchemyError):
        await of(session.execute(sa.text("INSERT INTO nowhere VALUES (1)")))
    await of(idempotency.mark_failed("order-1"))
    await of(session.commit())
    assert (charges(url), record(url).state) == (0, "FAILED")


async def test_a_holder_that_died_is_taken_over_when_its_lease_has_ended(url, shop, session):
    dead = SqlAlchemyIdempotency(session)
    await lock(dead)
    age(url, "lease_until")
    await lock(SqlAlchemyIdempotency(shop.session()))
    assert record(url).number == 2
    await of(session.execute(CHARGE))
    with pytest.raises(ClaimLostError):
        await store(dead)
    await of(session.commit())
    assert charges(url) == 0


async def test_who_comes_too_late_hears_what_the_other_has_answered(url, shop, session):
    dead = SqlAlchemyIdempotency(session)
    await lock(dead)
    age(url, "lease_until")
    other = shop.session()
    await settled(other, SqlAlchemyIdempotency(other), response={"by": "other"})
    await of(session.execute(CHARGE))
    with pytest.raises(DuplicateExecutionError) as caught:
        await store(dead, response={"by": "me"})
    assert caught.value.result.response == {"by": "other"}
    await of(dead.mark_failed("order-1"))
    await of(session.commit())
    assert charges(url) == 1
    assert record(url).state == "COMPLETED"


async def test_another_operation_or_request_under_the_same_key_is_refused(url, shop, session):
    idempotency = SqlAlchemyIdempotency(session)
    await lock(idempotency)
    second = SqlAlchemyIdempotency(shop.session())
    for other in ({"request_hash": "xyz789"}, {"operation": "CancelOrder"}):
        with pytest.raises(IdempotencyConflictError):
            await lock(second, **other)
    await store(idempotency)
    await of(session.commit())
    for other in ({"request_hash": "xyz789"}, {"operation": "CancelOrder"}):
        with pytest.raises(IdempotencyConflictError):
            await lock(second, **other)
        with pytest.raises(IdempotencyConflictError):
            await of(second.get_response("order-1", **{**ORDER, **other}))
    assert await of(second.get_response("order-1", **ORDER))


@on_one_database
async def test_advice_in_errors_of_lock_names_parameters_that_lock_has(url, shop, session):
    await lock(SqlAlchemyIdempotency(session))
    second = SqlAlchemyIdempotency(shop.session())
    told = []
    for asked in ({}, {"request_hash": "xyz789"}, {"operation": "CancelOrder"}):
        with pytest.raises((InProgressError, IdempotencyConflictError)) as caught:
            await lock(second, **asked)
        told.append(str(caught.value))
    assert not [name for name in NOT_OF_LOCK for text in told if name in text]
    assert told[0].endswith("Retry later")
    assert told[1].endswith(
        "Use a new key for a new effect, or leave out of request_hash= what "
        "may differ between repeats"
    )
    assert told[2].endswith(
        "was used before for another operation; nothing was run. Use a new key for a new effect"
    )


NOT_OF_LOCK = ("fingerprint", "per_operation", "on_duplicate")


async def test_tenants_never_share(url, shop, session):
    await settled(session, SqlAlchemyIdempotency(session, tenant_id="a"), response={"of": "a"})
    other = shop.session()
    idempotency = SqlAlchemyIdempotency(other, tenant_id="b")
    assert await of(idempotency.get_response("order-1")) is None
    await settled(other, idempotency, response={"of": "b"})
    for tenant in ("a", "b"):
        cached = await of(SqlAlchemyIdempotency(session, tenant_id=tenant).get_response("order-1"))
        assert (cached.tenant_id, cached.response) == (tenant, {"of": tenant})


@pytest.mark.parametrize("tenant", ["", None, 0, []], ids=repr)
def test_an_empty_tenant_that_is_named_is_refused(tmp_path, tenant):
    session = Session(engine_to(f"sqlite:///{tmp_path}/shop.db"))
    with pytest.raises(SettingsError, match="names no tenant"):
        SqlAlchemyIdempotency(session, tenant_id=tenant)


async def test_what_has_expired_is_deleted_and_nothing_else(url, shop, session):
    idempotency = SqlAlchemyIdempotency(session)
    for key in ("a", "b", "kept"):
        await settled(session, idempotency, key)
    await lock(SqlAlchemyIdempotency(shop.session()), "held")
    age(url, "expires_at", "a")
    age(url, "expires_at", "b")
    assert await of(SqlAlchemyIdempotency(shop.session()).cleanup_expired()) == 2
    assert await of(SqlAlchemyIdempotency(shop.session()).cleanup_expired()) == 0
    assert record(url, "kept").state == "COMPLETED"
    assert record(url, "held").state == "PENDING"


async def test_an_expired_response_is_gone_and_its_key_is_free(url, session):
    idempotency = SqlAlchemyIdempotency(session)
    await settled(session, idempotency)
    age(url, "expires_at")
    assert await of(idempotency.get_response("order-1")) is None
    await settled(session, idempotency)
    assert charges(url) == 2


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
async def test_a_renewal_under_an_older_snapshot_is_told_and_can_be_tried_again(url):
    engine = create_async_engine(
        with_driver(parse(url), "async"), isolation_level="REPEATABLE READ"
    )
    try:
        async with AsyncSession(engine) as session:
            idempotency = SqlAlchemyIdempotency(session)
            await lock(idempotency)
            await session.execute(CHARGE)
            (call,) = session.info["semel.held"].calls.values()
            await call._renew()
            with pytest.raises(StoreUnavailableError, match="roll it back and call again"):
                await store(idempotency)
            assert (charges(url), record(url).state) == (0, "FAILED")
            await settled(session, idempotency)
        assert charges(url) == 1
    finally:
        await engine.dispose()


# --- committing ---------------------------------------------------------------------------------


@on_one_database
async def test_nobody_commits_between_lock_and_response(url, shop, session):
    idempotency = SqlAlchemyIdempotency(session)
    await lock(idempotency)
    savepoint = await of(session.begin_nested())
    await of(session.execute(CHARGE))
    await of(savepoint.commit())
    with pytest.raises(SettingsError, match="Call store_response first"):
        await of(session.commit())
    assert charges(url) == 0
    await store(idempotency)
    await of(session.commit())
    assert charges(url) == 1
    await of(session.execute(CHARGE))
    await of(session.commit())


@on_one_database
async def test_two_keys_in_one_session_both_need_their_response(url, session):
    idempotency = SqlAlchemyIdempotency(session)
    await lock(idempotency, "a")
    await lock(idempotency, "b")
    await store(idempotency, "a")
    with pytest.raises(SettingsError, match="Call store_response first"):
        await of(session.commit())
    await store(idempotency, "b")
    await of(session.commit())
    assert [record(url, key).state for key in "ab"] == ["COMPLETED", "COMPLETED"]


@on_one_database
async def test_a_rollback_in_between_keeps_the_key(url, shop, session):
    idempotency = SqlAlchemyIdempotency(session)
    await lock(idempotency)
    await of(session.execute(CHARGE))
    await of(session.rollback())
    (call,) = session.info["semel.held"].calls.values()
    assert call.attempt._active
    await of(session.execute(CHARGE))
    await store(idempotency)
    await of(session.commit())
    assert charges(url) == 1


@on_one_database
async def test_a_response_that_was_rolled_back_is_not_there_and_can_be_marked(url, session):
    idempotency = SqlAlchemyIdempotency(session)
    await lock(idempotency)
    await store(idempotency)
    await of(session.rollback())
    assert record(url).state == "PENDING"
    await of(idempotency.mark_failed("order-1"))
    assert record(url).state == "FAILED"


@on_one_database
async def test_another_object_over_the_same_session_knows_its_locks(url, session):
    await lock(SqlAlchemyIdempotency(session))
    await of(SqlAlchemyIdempotency(session).mark_failed("order-1"))
    assert record(url).state == "FAILED"


@on_one_database
async def test_a_key_of_somebody_else_is_left_alone(url, shop, session):
    await lock(SqlAlchemyIdempotency(session))
    other = shop.session()
    await of(other.execute(CHARGE))
    await of(SqlAlchemyIdempotency(other).mark_failed("order-1"))
    await of(other.commit())
    assert (record(url).state, charges(url)) == ("PENDING", 0)
    with pytest.raises(SettingsError, match="call lock first"):
        await store(SqlAlchemyIdempotency(other))


# --- a session that ends without a word ---------------------------------------------------------


@on_one_database
async def test_while_the_handler_runs_its_lease_is_renewed(url, session):
    idempotency = SqlAlchemyIdempotency(session, lease=0.3)
    await lock(idempotency)
    first = record(url).lease_until

    async def renewed_twice():
        return record(url).lease_until - first > timedelta(seconds=0.3)

    await eventually(renewed_twice)
    assert record(url).lease_until > datetime.now(UTC)
    await store(idempotency)
    await of(session.commit())


@on_one_database
async def test_a_session_that_is_closed_renews_no_more(url, shop, session):
    idempotency = SqlAlchemyIdempotency(session, lease=0.3)
    await lock(idempotency)
    await of(session.execute(CHARGE))
    await of(session.begin_nested())
    await of(session.rollback())
    await of(session.execute(CHARGE))
    (call,) = session.info["semel.held"].calls.values()
    assert call.attempt._active
    await of(session.close())
    assert not call.attempt._active
    second = SqlAlchemyIdempotency(shop.session())

    async def ended():
        return record(url).lease_until < datetime.now(UTC)

    await eventually(ended)
    await lock(second)
    await of(session.execute(CHARGE))
    await of(session.commit())  # it is used for something else now


@on_one_database
async def test_after_a_savepoint_was_rolled_back_a_close_is_still_a_close(session):
    await lock(SqlAlchemyIdempotency(session))
    nested = await of(session.begin_nested())
    await of(nested.rollback())
    (call,) = session.info["semel.held"].calls.values()
    await of(session.close())
    assert not call.attempt._active


@on_one_database
async def test_a_session_that_is_gone_renews_no_more(url, shop):
    session = shop.session()
    shop.sessions.clear()
    await lock(SqlAlchemyIdempotency(session, lease=0.3))
    (call,) = session.info["semel.held"].calls.values()
    del session
    gc.collect()
    assert call.session() is None

    async def let_go():
        return not call.attempt._active

    await eventually(let_go)


@on_one_database
async def test_a_closed_session_can_still_give_its_key_back(url, session):
    idempotency = SqlAlchemyIdempotency(session)
    await lock(idempotency)
    await of(session.execute(CHARGE))
    await of(session.close())
    await of(idempotency.mark_failed("order-1"))
    assert (record(url).state, charges(url)) == ("FAILED", 0)


@on_one_database
async def test_a_session_that_is_used_for_ever_keeps_nothing(session):
    idempotency = SqlAlchemyIdempotency(session)
    for number in range(3):
        await settled(session, idempotency, f"order-{number}")
        assert session.info["semel.held"].calls == {}
    for number in range(3):
        await lock(idempotency, f"left-{number}")
        await of(session.execute(CHARGE))
        await of(session.close())
        assert len(session.info["semel.held"].calls) == 1


# --- responses ----------------------------------------------------------------------------------


class Answer(BaseModel):
    id: int
    at: datetime


@pytest.mark.parametrize(
    ("given", "replayed"),
    [
        ([], []),
        ("done", "done"),
        ({"ü": [1, 2.5, None, True]}, {"ü": [1, 2.5, None, True]}),
        (
            Answer(id=1, at=datetime(2024, 5, 1, tzinfo=UTC)),
            {"id": 1, "at": "2024-05-01T00:00:00Z"},
        ),
        ({"text": "x" * 100_000}, {"text": "x" * 100_000}),
    ],
    ids=["empty", "text", "nested", "model", "large"],
)
async def test_a_response_comes_back_as_json_says_it(url, session, given, replayed):
    idempotency = SqlAlchemyIdempotency(session)
    await settled(session, idempotency, response=given, status_code=200)
    cached = await of(idempotency.get_response("order-1"))
    assert cached
    assert (cached.response, cached.status_code) == (replayed, 200)


@on_one_database
@pytest.mark.parametrize(
    "response", [{"at": datetime(2024, 5, 1, tzinfo=UTC)}, float("nan"), object(), "\ud800"]
)
async def test_what_json_cannot_say_is_refused_before_it_is_committed(url, session, response):
    idempotency = SqlAlchemyIdempotency(session)
    await lock(idempotency)
    await of(session.execute(CHARGE))
    with pytest.raises(SettingsError, match="what JSON can say"):
        await store(idempotency, response=response)
    await of(idempotency.mark_failed("order-1"))
    assert (charges(url), record(url).state) == (0, "FAILED")


@on_one_database
async def test_a_response_too_large_to_keep_has_happened_and_is_said_to_be(url, session, caplog):
    idempotency = SqlAlchemyIdempotency(session)
    await settled(session, idempotency, response="x" * 1_100_000)
    assert "more than 1048576" in caplog.text
    assert "a repeat of this call will raise ResultLostError" in caplog.text
    with pytest.raises(ResultLostError):
        await of(idempotency.get_response("order-1"))
    with pytest.raises(ResultLostError):
        await lock(idempotency)
    assert charges(url) == 1


@pytest.mark.parametrize("key", ["k" * 8_000, "nul\0", "\ud800", "ünïcode", "a\\b"])
async def test_any_text_is_a_key(url, session, key):
    idempotency = SqlAlchemyIdempotency(session)
    await settled(session, idempotency, key)
    assert (await of(idempotency.get_response(key))).status_code == 201
    assert await of(idempotency.get_response(key + "x")) is None


# --- the record as rows -------------------------------------------------------------------------


async def test_records_are_selected_like_any_other_rows(url, shop, session):
    idempotency = SqlAlchemyIdempotency(session, tenant_id="a\\b")
    before = datetime.now(UTC) - timedelta(minutes=1)
    await settled(session, idempotency, "odd\\key")
    await settled(session, idempotency, "large", response="x" * 100_000)
    await lock(idempotency, "running")
    reading = shop.session()
    found = await of(
        reading.execute(
            sa.select(IdempotencyRecord)
            .where(IdempotencyRecord.tenant_id == "a\\b", IdempotencyRecord.created_at > before)
            .order_by(IdempotencyRecord.idempotency_key.desc())
        )
    )
    running, odd, large = found.scalars().all()
    assert (odd.idempotency_key, odd.tenant_id, odd.operation) == (
        "odd\\key",
        "a\\b",
        "CreateOrder",
    )
    assert (odd.response, odd.status_code, odd.state) == (
        {"id": 7, "total": "40.00"},
        201,
        "COMPLETED",
    )
    assert odd.request_hash == "abc123"
    assert is_a_day(odd.expires_at - odd.completed_at)
    assert (large.response, large.body[:3]) == (None, b'"xx')
    assert (running.state, running.response, running.status_code) == ("PENDING", None, None)


@on_one_database
async def test_records_are_not_written_by_hand(session):
    await settled(session, SqlAlchemyIdempotency(session))
    found = (await of(session.execute(sa.select(IdempotencyRecord)))).scalar_one()
    found.state = "FAILED"
    with pytest.raises(SettingsError, match="for reading"):
        await of(session.flush())
    await of(session.rollback())
    session.add(IdempotencyRecord(id=b"x"))
    with pytest.raises(SettingsError, match="for reading"):
        await of(session.flush())


@dataclass
class Command:
    amount: int
    to: str


class Model(BaseModel):
    amount: int
    to: str


def test_a_request_is_hashed_by_what_it_says():
    assert hash_request({"a": 1, "b": 2}) == hash_request({"b": 2, "a": 1})
    assert hash_request({"a": 1}) != hash_request({"a": "1"})
    assert hash_request(Command(1, "x")) == hash_request(Command(1, "x"))
    assert hash_request(Command(1, "x")) != hash_request(Command(1, "y"))
    assert hash_request(Model(amount=1, to="x")) == hash_request(Model(amount=1, to="x"))
    assert len(hash_request(None)) == 64
    with pytest.raises(SettingsError, match="give a request_hash of your own"):
        hash_request(object())


@on_one_database
async def test_the_table_shows_the_hash_that_was_given(url, session):
    asked = hash_request(Command(1, "x"))
    await lock(SqlAlchemyIdempotency(session), request_hash=asked)
    assert record(url).fingerprint.hex() == asked


# --- where the records are ----------------------------------------------------------------------


@on_one_database
async def test_there_is_one_store_per_engine(url, shop):
    first, second = (SqlAlchemyIdempotency(shop.session()) for _ in range(2))
    assert first._store is second._store
    assert SqlAlchemyIdempotency(Session(engine_to(url)))._store is not first._store


@on_one_database
async def test_an_engine_is_not_kept_alive_by_its_store(url):
    import weakref

    engine = engine_to(url)
    idempotency = SqlAlchemyIdempotency(Session(engine))
    assert run(idempotency._get("order-1", None, None)) is None
    known = weakref.ref(engine)
    del engine, idempotency
    gc.collect()
    assert known() is None


@on_one_database
async def test_a_store_of_its_own(url, shop, session):
    own = SQLStore(url)
    try:
        idempotency = SqlAlchemyIdempotency(session, store=own)
        await settled(session, idempotency)
        assert (await of(idempotency.get_response("order-1"))).status_code == 201
    finally:
        await own.aclose()


async def test_what_cannot_work_is_refused(tmp_path):
    memory = sa.create_engine("sqlite://")
    with pytest.raises(SettingsError, match="in memory"), Session(memory) as session:
        SqlAlchemyIdempotency(session)
    memory.dispose()
    engine = sa.create_engine(f"sqlite:///{tmp_path}/empty.db")
    with Session(engine) as session:
        with pytest.raises(SettingsError, match="share the session's transaction"):
            SqlAlchemyIdempotency(session, store=MemoryStore())
        with pytest.raises(NoTableError, match="semel db init"):
            SqlAlchemyIdempotency(session).get_response("order-1")
        with pytest.raises(SettingsError, match="not a duration"):
            SqlAlchemyIdempotency(session, ttl="day")
    with pytest.raises(SettingsError, match="int"):
        SqlAlchemyIdempotency(5)
    each = engine.execution_options(isolation_level="AUTOCOMMIT")
    with Session(each) as session, pytest.raises(SettingsError, match="AUTOCOMMIT"):
        SqlAlchemyIdempotency(session).lock(idempotency_key="k", operation="o")
    engine.dispose()


@on_one_database
async def test_sessions_behind_a_registry(url):
    engine = engine_to(url)
    async_engine = create_async_engine(with_driver(parse(url), "async"))
    sync = scoped_session(make_sessions(engine))
    asynchronous = async_scoped_session(
        make_sessions(class_=AsyncSession, bind=async_engine), scopefunc=asyncio.current_task
    )
    try:
        await settled(sync, SqlAlchemyIdempotency(sync), "a")
        await settled(asynchronous, SqlAlchemyIdempotency(asynchronous), "b")
        assert charges(url) == 2
    finally:
        sync.remove()
        await asynchronous.remove()
        await async_engine.dispose()


@on_one_database
async def test_a_store_that_cannot_be_reached_does_not_hide_the_handlers_own_error(
    url, session, caplog, monkeypatch
):
    idempotency = SqlAlchemyIdempotency(session)
    await lock(idempotency)
    (call,) = session.info["semel.held"].calls.values()

    async def down(*_, **__):
        raise StoreUnavailableError("nobody answers")

    monkeypatch.setattr(type(idempotency._store.ledger(idempotency._colour)), "release", down)
    await of(idempotency.mark_failed("order-1"))
    assert "nobody answers" in caplog.text
    assert not call.attempt._active
