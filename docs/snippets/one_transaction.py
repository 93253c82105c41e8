import asyncio
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel import once
from semel.stores import SQLStore

engine = sa.create_engine("sqlite:///orders.db")
with engine.begin() as connection:
    connection.execute(sa.text("CREATE TABLE IF NOT EXISTS orders (id TEXT, amount INTEGER)"))

store = SQLStore(engine, create=True)


# --- sync
def place_order(order, amount):
    with (
        Session(engine) as session,
        session.begin(),
        once(
            f"order:{order}",
            store=store.bind(session),
            operation="place_order",
            fingerprint=amount,
            on_duplicate="return",
        ) as attempt,
    ):
        if not attempt.replayed:
            session.execute(
                sa.text("INSERT INTO orders VALUES (:id, :amount)"), {"id": order, "amount": amount}
            )
            attempt.done({"order": order, "amount": amount})
    return attempt.result


# --- a failure
def place_and_fail(order, amount):
    with (
        Session(engine) as session,
        session.begin(),
        once(f"order:{order}", store=store.bind(session), operation="place_order"),
    ):
        session.execute(
            sa.text("INSERT INTO orders VALUES (:id, :amount)"), {"id": order, "amount": amount}
        )
        raise ConnectionError("after the row was written")  # the row goes, then the claim


# --- async
async_engine = create_async_engine("sqlite+aiosqlite:///orders.db")
async_store = SQLStore(async_engine)


async def place_order_async(order, amount):
    async with (
        AsyncSession(async_engine) as session,
        session.begin(),
        once(
            f"order:{order}",
            store=async_store.bind(session),
            operation="place_order",
            fingerprint=amount,
            on_duplicate="return",
        ) as attempt,
    ):
        if not attempt.replayed:
            await session.execute(
                sa.text("INSERT INTO orders VALUES (:id, :amount)"), {"id": order, "amount": amount}
            )
            attempt.done({"order": order, "amount": amount})
    return attempt.result


def count():
    with engine.begin() as connection:
        return connection.execute(sa.text("SELECT count(*) FROM orders")).scalar()


async def main(order):
    try:
        assert await place_order_async(order, 15) == await place_order_async(order, 15)
    finally:
        await async_store.aclose()
        await async_engine.dispose()


if __name__ == "__main__":
    before, order = count(), f"o-{uuid4()}"  # a new one: the ledger remembers the last run
    assert place_order(order, 40) == place_order(order, 40) == {"order": order, "amount": 40}
    assert count() == before + 1
    asyncio.run(main(f"{order}-async"))
    assert count() == before + 2
    for _ in range(2):  # the row is rolled back and the key is free at once
        try:
            place_and_fail(f"{order}-failing", 5)
        except ConnectionError:
            assert count() == before + 2
