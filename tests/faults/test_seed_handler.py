"""The usual idempotent FastAPI handler, step by step, and what used to go wrong with it.

The handler looks the response up, locks, executes, stores the response and commits; when that
fails it marks the key as failed, commits and raises. Written on a table of its own that way has
eleven known defects. Here each of them is provoked. Started as a program, this file is a worker
that is killed in the middle of the handler.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import httpx
import pytest
import sqlalchemy as sa
from fastapi import Depends, FastAPI, Header, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from semel import DuplicateExecutionError, InProgressError
from semel.http.sqlalchemy import (
    IdempotencyConflictError,
    IdempotencyRecord,
    SqlAlchemyIdempotency,
    hash_request,
)
from semel.stores.sql import init
from semel.stores.sql.lines import parse, with_driver
from support.proxy import Proxy

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.timeout(60)


class CreateOrder(BaseModel):
    amount: int


DEBIT = sa.text("UPDATE account SET balance = balance - :amount WHERE name = 'a'")
CREDIT = sa.text("UPDATE account SET balance = balance + :amount WHERE name = 'b'")


class Shop:
    """The app, its database, and what happens between debit and credit."""

    def __init__(self, url, lease=30, **options):
        self.engine = create_async_engine(with_driver(parse(url), "async"), **options)
        self.lease = lease
        self.executed = 0
        self.sessions = []
        self.app = make_app(self)

    async def between(self, session):
        """For a test to replace."""

    async def before(self, session):
        """For a test to replace."""

    async def execute(self, session, command, operation="CreateOrder"):
        self.executed += 1
        await self.before(session)
        await session.execute(DEBIT, {"amount": command.amount})
        await self.between(session)
        await session.execute(CREDIT, {"amount": command.amount})
        return {"order": self.executed, "operation": operation, "amount": command.amount}

    async def post(self, key="order-1", amount=30, tenant="t1", path="/orders"):
        headers = {"idempotency-key": key, "x-tenant": tenant}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await client.post(path, json={"amount": amount}, headers=headers)


async def get_session(request: Request):
    shop = request.app.state.shop
    async with AsyncSession(shop.engine) as session:
        shop.sessions.append(session)
        yield session


Key = Annotated[str, Header(alias="Idempotency-Key")]
Tenant = Annotated[str, Header(alias="X-Tenant")]
Sessioned = Annotated[AsyncSession, Depends(get_session)]


def make_app(shop):
    app = FastAPI()
    app.state.shop = shop

    async def handle(command, idempotency_key, tenant, session, operation):
        idempotency = SqlAlchemyIdempotency(session, tenant_id=tenant, lease=shop.lease)
        # By what it says: the class itself may move to another module while a client retries.
        request_hash = hash_request(command.model_dump())

        # 1. Is there a response already?
        cached = await idempotency.get_response(
            idempotency_key, operation=operation, request_hash=request_hash
        )
        if cached:
            return JSONResponse(content=cached.response, status_code=cached.status_code)

        # 2. Lock the key.
        await idempotency.lock(
            idempotency_key=idempotency_key, operation=operation, request_hash=request_hash
        )
        try:
            # 3. Execute.
            result = await shop.execute(session, command, operation)
            # 4. Store the response.
            await idempotency.store_response(
                idempotency_key=idempotency_key, response=result, status_code=201
            )
            await session.commit()
        except Exception:
            # 5. Mark it as failed: it may be tried again.
            await idempotency.mark_failed(idempotency_key)
            await session.commit()
            raise
        return result

    @app.post("/orders", status_code=201)
    async def create_order(command: CreateOrder, key: Key, tenant: Tenant, session: Sessioned):
        return await handle(command, key, tenant, session, "CreateOrder")

    @app.post("/refunds", status_code=201)
    async def create_refund(command: CreateOrder, key: Key, tenant: Tenant, session: Sessioned):
        return await handle(command, key, tenant, session, "CreateRefund")

    def refused(status):
        return lambda _, error: JSONResponse({"detail": str(error)}, status)

    app.add_exception_handler(IdempotencyConflictError, refused(422))
    app.add_exception_handler(InProgressError, refused(409))
    app.add_exception_handler(
        DuplicateExecutionError,
        lambda _, error: JSONResponse(error.result.response, error.result.status_code),
    )
    app.add_exception_handler(
        Exception, lambda _, error: JSONResponse({"detail": type(error).__name__}, 500)
    )
    return app


# --- the database -------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgres"])
def url(request, tmp_path):
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        url = request.getfixturevalue(f"{request.param}_url")
    init(url)
    with engine_to(url).begin() as connection:
        connection.exec_driver_sql("CREATE TABLE account (name VARCHAR(9), balance INTEGER)")
        connection.exec_driver_sql("INSERT INTO account VALUES ('a', 100), ('b', 0)")
    return url


@pytest.fixture
async def shop(url):
    shop = Shop(url)
    yield shop
    await shop.engine.dispose()


def engine_to(url):
    return sa.create_engine(with_driver(parse(url), "sync"), poolclass=sa.NullPool)


def balances(url):
    with engine_to(url).connect() as connection:
        found = connection.exec_driver_sql("SELECT balance FROM account ORDER BY name")
        return tuple(found.scalars())


def records(url):
    with engine_to(url).connect() as connection, sa.orm.Session(connection) as session:
        found = session.scalars(sa.select(IdempotencyRecord)).all()
        session.expunge_all()
        return found


def change(url, statement):
    with engine_to(url).begin() as connection:
        connection.exec_driver_sql(statement)


LEASE_OVER = "UPDATE idempotency SET lease_until = '2020-01-01 00:00:00.000000'"
EXPIRED = "UPDATE idempotency SET expires_at = '2020-01-01 00:00:00.000000'"


def failing(*errors):
    """Raises each of them once, and then nothing."""
    left = list(errors)

    async def fail(session):
        if left:
            raise left.pop(0)

    return fail


async def test_the_walk(url, shop):
    first = await shop.post()
    again = await shop.post()
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json()
    assert (balances(url), shop.executed) == ((70, 30), 1)


# --- the eleven defects -------------------------------------------------------------------------


async def test_01_marking_a_failure_does_not_commit_half_done_writes(url, shop):
    shop.between = failing(LookupError("no such account"))
    assert (await shop.post()).status_code == 500
    assert balances(url) == (100, 0)
    assert [found.state for found in records(url)] == ["FAILED"]
    assert (await shop.post()).status_code == 201
    assert balances(url) == (70, 30)


async def test_02_an_error_of_the_database_is_not_masked_and_the_record_does_not_vanish(url, shop):
    async def break_it(session):
        await session.execute(sa.text("INSERT INTO nowhere VALUES (1)"))

    shop.between = break_it
    response = await shop.post()
    assert response.json()["detail"] in ("ProgrammingError", "OperationalError")
    (found,) = records(url)
    assert found.state == "FAILED"
    assert "nowhere" in found.error
    del shop.between
    assert (await shop.post()).status_code == 201
    assert balances(url) == (70, 30)


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
async def test_03_a_lost_reply_to_the_commit_does_not_charge_twice(url):
    direct = make_url(url)
    with Proxy(direct.port) as proxy:
        through = direct.set(port=proxy.port).render_as_string(hide_password=False)
        shop = Shop(through)
        try:

            async def trap(session):
                proxy.cut_after_request(b"COMMIT")

            shop.between = trap
            first = await shop.post()
            del shop.between
            assert (first.status_code, proxy.cuts) == (500, 1)
            assert [found.state for found in records(url)] == ["COMPLETED"]
            again = await shop.post()
            assert again.json() == {"order": 1, "operation": "CreateOrder", "amount": 30}
            assert (balances(url), shop.executed) == ((70, 30), 1)
        finally:
            await shop.engine.dispose()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_03_an_error_after_the_commit_does_not_charge_twice(url, shop):
    """No reply can be lost inside one process; a hook that fails after the commit looks alike."""

    def fail(_):
        raise OSError("gone")

    async def trap(session):
        event.listen(session.sync_session, "after_commit", fail, once=True)

    shop.between = trap
    assert (await shop.post()).status_code == 500
    assert [found.state for found in records(url)] == ["COMPLETED"]
    assert (await shop.post()).json()["order"] == 1
    assert (balances(url), shop.executed) == ((70, 30), 1)


async def test_04_a_racing_request_waits_for_nobody_and_holds_no_connection(url, shop):
    running, go_on = asyncio.Event(), asyncio.Event()

    async def wait(session):
        running.set()
        await go_on.wait()

    shop.before = wait
    first = asyncio.ensure_future(shop.post())
    await running.wait()
    second = await shop.post()
    assert second.status_code == 409
    assert shop.engine.pool.checkedout() == 0  # the first has not written yet, the second is gone
    del shop.before
    other = await shop.post(key="order-2")  # another key does not wait either
    assert other.status_code == 201
    go_on.set()
    answered = await first
    assert answered.status_code == 201
    assert (await shop.post()).json() == answered.json()
    assert (balances(url), shop.executed) == ((40, 60), 2)


async def test_04_of_many_at_once_one_executes_and_nobody_sees_a_server_error(url, shop):
    responses = await asyncio.gather(*(shop.post() for _ in range(12)))
    statuses = {response.status_code for response in responses}
    assert 201 in statuses
    assert statuses <= {201, 409}
    assert len({response.text for response in responses if response.status_code == 201}) == 1
    assert (balances(url), shop.executed) == ((70, 30), 1)


async def test_05_what_failed_or_expired_can_be_tried_again(url, shop):
    shop.between = failing(LookupError(), LookupError())
    for _ in range(2):
        assert (await shop.post()).status_code == 500
    assert (await shop.post()).status_code == 201
    change(url, EXPIRED)
    assert (await shop.post()).status_code == 201
    assert (balances(url), shop.executed) == ((40, 60), 4)


async def test_06_a_crash_leaves_a_lease_and_not_a_key_that_is_stuck(url, shop):
    child = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, __file__, url],
        cwd=TESTS,
        timeout=50,
        check=False,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    assert child.returncode == -signal.SIGKILL
    assert [found.state for found in records(url)] == ["PENDING"]
    assert balances(url) == (100, 0)
    while (response := await shop.post()).status_code == 409:
        await asyncio.sleep(0.05)
    assert response.status_code == 201
    assert balances(url) == (70, 30)


async def test_07_another_tenant_gets_neither_the_response_nor_a_refusal(url, shop):
    mine = await shop.post(tenant="t1")
    theirs = await shop.post(tenant="t2", amount=20)
    assert (mine.json()["amount"], theirs.json()["amount"]) == (30, 20)
    assert theirs.status_code == 201
    assert sorted(found.tenant_id for found in records(url)) == ["t1", "t2"]


async def test_08_another_payload_or_endpoint_is_refused_before_and_after_the_response(url, shop):
    running, go_on = asyncio.Event(), asyncio.Event()

    async def wait(session):
        running.set()
        await go_on.wait()

    shop.before = wait
    first = asyncio.ensure_future(shop.post())
    await running.wait()
    others = ({"amount": 31}, {"path": "/refunds"})
    assert [(await shop.post(**other)).status_code for other in others] == [422, 422]
    go_on.set()
    assert (await first).status_code == 201
    assert [(await shop.post(**other)).status_code for other in others] == [422, 422]
    assert (balances(url), shop.executed) == ((70, 30), 1)


async def test_09_a_cancelled_request_leaves_no_rows_and_nobody_renewing(url, shop):
    running = asyncio.Event()

    async def hang(session):
        running.set()
        await asyncio.Event().wait()

    shop.between = hang
    request = asyncio.ensure_future(shop.post())
    await running.wait()
    (call,) = shop.sessions[0].info["semel.held"].calls.values()
    assert call.attempt._active
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert not call.attempt._active
    assert balances(url) == (100, 0)
    del shop.between
    assert (await shop.post()).status_code == 409  # until the lease ends by itself
    change(url, LEASE_OVER)
    assert (await shop.post()).status_code == 201
    assert balances(url) == (70, 30)


async def test_10_a_handler_that_commits_by_itself_is_refused_and_commits_nothing(url, shop):
    async def commit(session):
        await session.commit()

    shop.between = commit
    response = await shop.post()
    assert (response.status_code, response.json()) == (500, {"detail": "SettingsError"})
    assert balances(url) == (100, 0)
    (found,) = records(url)
    assert "Call store_response first" in found.error


async def test_11_cleaning_up_spares_a_running_handler(url, shop):
    async def clean(session):
        assert await SqlAlchemyIdempotency(session).cleanup_expired() == 0

    shop.before = clean
    assert (await shop.post()).status_code == 201
    assert (balances(url), shop.executed) == ((70, 30), 1)


async def test_11_a_record_deleted_under_a_running_handler_does_not_go_unnoticed(url, shop):
    async def delete(session):
        change(url, "DELETE FROM idempotency")

    shop.before = delete
    response = await shop.post()
    assert (response.status_code, response.json()) == (500, {"detail": "ClaimLostError"})
    assert balances(url) == (100, 0)


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_11_a_stricter_isolation_makes_no_difference(url, level):
    shop = Shop(url, isolation_level=level)
    try:
        responses = await asyncio.gather(*(shop.post() for _ in range(8)))
        assert {response.status_code for response in responses} <= {201, 409}
        assert (await shop.post()).status_code == 201
        assert (balances(url), shop.executed) == ((70, 30), 1)
    finally:
        await shop.engine.dispose()


@pytest.mark.parametrize("key", ["k" * 8_000, b"nul\x00", b"\xed\xa0\x80", "'; --"])
async def test_11_no_key_makes_a_server_error(url, shop, key):
    first, again = await shop.post(key=key), await shop.post(key=key)
    assert (first.status_code, again.json()) == (201, first.json())
    assert shop.executed == 1


# --- the worker that is killed ------------------------------------------------------------------


async def killed_in_the_middle(url):
    async def die(session):
        os.kill(os.getpid(), signal.SIGKILL)

    shop = Shop(url, lease=0.5)
    shop.between = die
    await shop.post()


if __name__ == "__main__":
    asyncio.run(killed_in_the_middle(sys.argv[1]))
