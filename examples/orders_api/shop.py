"""An orders API: payment, order, event and response happen once, however often they are asked for.

    POST /orders        charge the card, write the order and its event, answer
    GET  /orders        one's own orders
    GET  /orders/{id}   one of them

Environment: `ORDERS_URL` is the database (SQLite or PostgreSQL), `BANK_URL` the bank's, and
`BANK_ANSWERS_AFTER_S` makes the bank slow, so that there is time to kill the shop in between.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import sqlalchemy as sa
from bank import Bank, DeclinedError
from fastapi import APIRouter, Depends, FastAPI, HTTPException
from fastapi.security import APIKeyHeader
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from tables import CUSTOMERS, Base, Customer, Order, hashed

from semel.http.fastapi import Idempotency, IdempotentRoute, RequestAttempt, Rule
from semel.outbox import Event, Outbox
from semel.stores import SQLStore
from semel.stores.sql import init

DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg"}


def database(name: str, default: str) -> sa.URL:
    url = sa.make_url(os.environ.get(name, default))
    return url.set(drivername=DRIVERS[url.get_backend_name()])


# --- the pieces
engine = create_async_engine(database("ORDERS_URL", "sqlite:///orders.db"))
sessions = async_sessionmaker(engine, expire_on_commit=False)
bank = Bank(
    database("BANK_URL", "sqlite:///bank.db"),
    answers_after_s=float(os.environ.get("BANK_ANSWERS_AFTER_S", "0")),
)
outbox = Outbox(routes={"order.placed": "orders"})
store = SQLStore(engine)


# --- who is asking
api_key = APIKeyHeader(name="X-API-Key", description="`key-of-ann` or `key-of-bob`")


async def customer(given: Annotated[str, Depends(api_key)]) -> Customer:
    """Looked up on every request: a key that was withdrawn is refused from that moment on."""
    async with sessions() as session:
        found = await session.get(Customer, hashed(given))
    if found is None:
        raise HTTPException(401, "unknown API key", headers={"WWW-Authenticate": "APIKey"})
    return found


async def tenant(who: Annotated[Customer, Depends(customer)]) -> str:
    return who.tenant


async def may_order(who: Annotated[Customer, Depends(customer)]) -> None:
    if not who.may_order:
        raise HTTPException(403, "this API key may not order any more")


async def get_session() -> AsyncIterator[AsyncSession]:
    async with sessions() as session:
        yield session


# --- once
idempotency = Idempotency(
    store=store,
    scope=tenant,
    session=get_session,
    # After a crash the key is free again when its lease has ended.
    rule=Rule(key="required", lease=float(os.environ.get("ORDERS_LEASE_S", "10"))),
)

router = APIRouter(
    route_class=IdempotentRoute,
    responses={401: {"description": "Unknown API key"}, 403: {"description": "Not allowed"}},
)

Session = Annotated[AsyncSession, Depends(get_session)]
Tenant = Annotated[str, Depends(tenant)]
Attempt = Annotated[RequestAttempt, Depends(idempotency)]


class Wanted(BaseModel):
    """What a customer asks for."""

    model_config = ConfigDict(extra="forbid")

    item: str = Field(min_length=1, max_length=200, pattern=r"^[^\x00]*$")
    cents: int = Field(gt=0, le=1_000_000)
    card: str = Field(
        pattern=r"^[a-z0-9-]{1,32}$", description="The card `empty` has no money on it."
    )


class Placed(BaseModel):
    """What was ordered and paid."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    item: str
    cents: int
    receipt: str


# --- the order
@router.post(
    "/orders",
    status_code=201,
    dependencies=[Depends(may_order)],
    responses={402: {"description": "The card was declined"}},
)
async def place_order(wanted: Wanted, whose: Tenant, attempt: Attempt, session: Session) -> Placed:
    """Charge the card and write the order down, once."""
    try:
        receipt = await attempt.step(
            "charge", bank.charge, wanted.card, wanted.cents, key=attempt.child_key("charge")
        )
    except DeclinedError:
        raise HTTPException(402, "the card was declined") from None
    order = Order(
        id=attempt.child_key("order"),
        tenant=whose,
        item=wanted.item,
        cents=wanted.cents,
        receipt=receipt,
    )
    session.add(order)
    outbox.add(
        session,
        Event(
            type="order.placed",
            tenant=whose,
            aggregate_type="order",
            aggregate_id=order.id,
            payload={"item": order.item, "cents": order.cents},
        ),
    )
    return Placed.model_validate(order)


# --- reading
@router.get("/orders")
async def orders(whose: Tenant, session: Session) -> list[Placed]:
    """The last hundred orders of whoever asks."""
    mine = sa.select(Order).where(Order.tenant == whose).order_by(Order.placed_at.desc())
    return [Placed.model_validate(order) for order in await session.scalars(mine.limit(100))]


@router.get("/orders/{order_id}", responses={404: {"description": "No order of yours"}})
async def order(order_id: str, whose: Tenant, session: Session) -> Placed:
    """One order of whoever asks."""
    mine = sa.select(Order).where(Order.tenant == whose, Order.id == order_id)
    found = (await session.scalars(mine)).one_or_none()
    if found is None:
        raise HTTPException(404, "you have no such order")
    return Placed.model_validate(found)


# --- the app
@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    init(engine)  # the ledger and the outbox; a deployment runs `semel db init` instead
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    await bank.open()
    async with sessions.begin() as session:
        for given, whose in CUSTOMERS.items():
            if await session.get(Customer, hashed(given)) is None:
                session.add(Customer(api_key_hash=hashed(given), tenant=whose))
    yield
    await store.aclose()
    await engine.dispose()
    await bank.close()


app = FastAPI(title="Orders", lifespan=lifespan)
app.include_router(router)
