"""The FastAPI door with a session: rows and recorded response in one transaction.

Every test runs on SQLite and PostgreSQL, with sessions of both colours.
"""

import asyncio
from typing import Annotated, Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import BackgroundTasks, Depends, HTTPException
from fastapi.responses import JSONResponse
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel.errors import SettingsError
from semel.http.fastapi import Idempotency, RequestAttempt
from semel.stores import SQLStore
from semel.stores.sql.lines import parse, with_driver
from support.fastapi_shop import Order, Shop, name, new_app, replayed, tenant

INSERT = sa.text("INSERT INTO orders (item) VALUES (:item)")


class Books:
    """A database with orders, behind an app; sessions of one colour."""

    def __init__(self, url, colour):
        self.colour = colour
        self.store = SQLStore(url, create=True)
        self.engine = sa.create_engine(with_driver(parse(url), "sync"))
        self.async_engine = create_async_engine(with_driver(parse(url), "async"))
        with self.engine.begin() as connection:
            connection.execute(sa.text("CREATE TABLE orders (item VARCHAR(50) UNIQUE)"))
        self.session = self.sync_session if colour == "sync" else self.async_session
        self.idempotency = Idempotency(store=self.store, scope=tenant, session=self.session)
        self.shop = Shop(new_app(), self.store)

    def sync_session(self):
        with Session(self.engine) as session:
            yield session

    async def async_session(self):
        async with AsyncSession(self.async_engine) as session:
            yield session

    def route(self, path="/orders", *, door=None, session=None, after=None):
        """An endpoint of this colour that inserts, and then does what `after` does."""
        attempts, sessions = Depends(door or self.idempotency), Depends(session or self.session)
        after = after or (lambda _session: None)

        def insert(order: Order, attempt: Any = attempts, session: Any = sessions):
            session.execute(INSERT, {"item": order.item})
            return after(session) or {"item": order.item}

        async def insert_async(order: Order, attempt: Any = attempts, session: Any = sessions):
            await session.execute(INSERT, {"item": order.item})
            said = after(session)
            return (await said if asyncio.iscoroutine(said) else said) or {"item": order.item}

        self.shop.app.post(path, status_code=201)(insert if self.colour == "sync" else insert_async)
        return self.shop

    def items(self):
        with self.engine.begin() as connection:
            return sorted(connection.execute(sa.text("SELECT item FROM orders")).scalars())

    async def close(self):
        await self.store.aclose()
        await self.async_engine.dispose()
        self.engine.dispose()


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request, tmp_path):
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path}/shop.db"


@pytest.fixture(params=["sync", "async"])
async def books(request, database_url):
    books = Books(database_url, request.param)
    yield books
    await books.close()


@pytest.mark.parametrize("key", ["k", None])
async def test_rows_are_there_when_the_response_is(books, key):
    shop = books.route()
    first = await shop.post(key=key)
    assert (first.status_code, books.items()) == (201, ["book"])
    if key:
        again = await shop.post(key=key)
        assert replayed(again)
        assert again.content == first.content
    assert books.items() == ["book"]


async def test_the_store_may_be_over_an_async_engine(books):
    store = SQLStore(books.async_engine, create=True)
    shop = books.route(door=Idempotency(store=store, scope=tenant, session=books.session))
    first = await shop.post(key="k")
    again = await shop.post(key="k")
    assert (replayed(first), replayed(again)) == (False, True)
    assert books.items() == ["book"]


async def test_a_store_that_cannot_share_is_refused_with_one_that_can(books):
    words = r"give SQLStore\(url\), or SQLStore over an AsyncEngine"
    with pytest.raises(SettingsError, match=words):
        Idempotency(store="memory://", scope=tenant, session=books.session)


@pytest.mark.parametrize("key", ["k", None])
async def test_an_answer_that_is_an_error_takes_the_rows_back(books, key):
    def refuse(_session):
        raise HTTPException(409, "sold out")

    shop = books.route(after=refuse)
    assert (await shop.post(key=key)).status_code == 409
    assert books.items() == []
    again = await shop.post(key=key)
    assert (again.status_code, replayed(again)) == (409, key is not None)


@pytest.mark.parametrize("key", ["k", None])
async def test_an_error_takes_the_rows_back_and_a_retry_runs(books, key):
    fails = [True]

    def fail(_session):
        if fails[0]:
            raise RuntimeError("no")

    shop = books.route(after=fail)
    assert (await shop.post(key=key)).status_code == 500
    assert books.items() == []
    fails[0] = False
    assert (await shop.post(key=key)).status_code == 201
    assert books.items() == ["book"]


@pytest.mark.parametrize("key", ["k", None])
async def test_rows_that_break_a_constraint_are_an_error_and_not_a_record(books, key):
    shop = books.route()
    assert (await shop.post(key="first")).status_code == 201
    broken = await shop.post(key=key)
    assert (broken.status_code, books.items()) == (500, ["book"])
    assert not replayed(await shop.post(key=key))


@pytest.mark.parametrize("key", ["k", None])
async def test_a_commit_of_ones_own_is_refused_with_what_to_do(books, key, caplog):
    told = []

    def commit(session):
        return session.commit()

    shop = books.route(after=commit)

    @shop.app.exception_handler(SettingsError)
    async def tell(_request, error):
        told.append(str(error))
        return JSONResponse({}, 500)

    assert (await shop.post(key=key)).status_code == 500
    assert "must not be committed before" in told[0]
    assert books.items() == []


@pytest.mark.parametrize("key", ["k", None])
async def test_a_session_that_ends_too_early_is_an_error_and_no_loss(books, key):
    def end(session):
        return session.close()

    shop = books.route(after=end)
    transport = httpx.ASGITransport(shop.app)
    headers = {"x-api-key": "secret-a", **({"idempotency-key": key} if key else {})}
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        with pytest.raises(SettingsError, match="the session was ended before"):
            await client.post("/orders", json={"item": "pen", "amount": 1}, headers=headers)
    assert books.items() == []


async def test_a_handler_may_bind_its_session_itself(books):
    door = Idempotency(store=books.store, scope=tenant)

    async def bound(
        attempt: Annotated[RequestAttempt, Depends(door)],
        session: Annotated[Any, Depends(books.session)],
    ):
        attempt.bind(session)
        return session

    shop = books.route(door=door, session=bound)
    for key in ("k", "k", None):
        await shop.post(key=key, json={"item": f"book {key}", "amount": 1})
    assert books.items() == ["book None", "book k"]


async def test_a_validation_error_ends_the_session_too(books):
    shop = books.route()
    assert (await shop.post(key="k", json={})).status_code == 422
    assert (await shop.post(json={})).status_code == 422
    assert (await shop.post(key="l")).status_code == 201


async def test_a_session_of_another_life_is_refused_where_the_route_is_made(books):
    for depends in (
        Depends(books.session, scope="function"),
        Depends(books.session, use_cache=False),
    ):
        with pytest.raises(SettingsError, match="another session than the one"):

            @books.shop.app.post("/wrong")
            async def wrong(
                attempt: Annotated[Any, Depends(books.idempotency)], session: Any = depends
            ):
                return {}


async def test_a_background_task_finds_the_rows_committed(books):
    found = []

    @books.shop.app.post("/both")
    async def both(
        order: Order,
        tasks: BackgroundTasks,
        _: Annotated[Any, Depends(books.idempotency)],
        session: Annotated[Any, Depends(books.session)],
    ):
        done = session.execute(INSERT, {"item": order.item})
        if asyncio.iscoroutine(done):
            await done
        tasks.add_task(lambda: found.append(books.items()))
        return {}

    assert (await books.shop.post("/both", key="k")).status_code == 200
    assert found == [["book"]]


@pytest.mark.parametrize("key", ["k", None])
async def test_a_session_that_is_none_is_refused_and_nothing_is_run(books, key):
    ran = []

    def nothing():
        return None

    attempts = Depends(Idempotency(store=books.store, scope=tenant, session=nothing))

    @books.shop.app.post("/blind")
    def blind(attempt: Any = attempts):
        ran.append(attempt)

    answer = await books.shop.post("/blind", key=key)
    assert answer.status_code == 500, answer.text
    assert not ran


async def test_a_commit_that_was_rolled_back_says_no_more_than_is_known(books, monkeypatch):
    def broken(_self, *_args):
        raise sa.exc.OperationalError("COMMIT", {}, Exception("gone"))

    shop = books.route()
    monkeypatch.setattr(Session, "commit", broken)
    answer = await shop.post(key="k")
    assert (answer.status_code, name(answer)) == (503, "store-unavailable")
    assert "nothing was done" not in answer.json()["detail"]
    monkeypatch.undo()
    assert books.items() == []
    assert (await shop.post(key="k")).status_code == 201
