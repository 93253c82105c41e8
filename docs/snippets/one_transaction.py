import asyncio

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel import once
from semel.stores import SQLStore

engine = sa.create_engine("sqlite:///shop.db")
with engine.begin() as connection:
    connection.execute(sa.text("CREATE TABLE orders (id TEXT, amount INTEGER)"))

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
async_engine = create_async_engine("sqlite+aiosqlite:///shop.db")
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


async def main():
    try:
        assert await place_order_async("o-8", 15) == await place_order_async("o-8", 15)
    finally:
        await async_store.aclose()
        await async_engine.dispose()


if __name__ == "__main__":
    assert place_order("o-7", 40) == place_order("o-7", 40) == {"order": "o-7", "amount": 40}
    assert count() == 1
    asyncio.run(main())
    assert count() == 2
    for _ in range(2):  # the row is rolled back and the key is free at once
        try:
            place_and_fail("o-9", 5)
        except ConnectionError:
            assert count() == 2
