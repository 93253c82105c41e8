import asyncio
from contextlib import asynccontextmanager
from typing import Annotated
from uuid import uuid4

import httpx
import sqlalchemy as sa
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from semel.http.fastapi import Idempotency, IdempotentRoute, RequestAttempt
from semel.stores import SQLStore

# --- the door
TENANTS = {"key-of-ann": "ann", "key-of-bob": "bob"}


def current_tenant(x_api_key: Annotated[str, Header()]) -> str:
    if x_api_key not in TENANTS:
        raise HTTPException(401, "unknown API key")
    return TENANTS[x_api_key]


engine = create_async_engine("sqlite+aiosqlite:///fastapi-shop.db")
store = SQLStore(engine, create=True)
idempotency = Idempotency(store=store, scope=current_tenant)

router = APIRouter(route_class=IdempotentRoute)


# --- an outside call
bank = []  # stands for your payment provider: one line per charge


class Charge(BaseModel):
    amount: int


@router.post("/charges", status_code=201)
async def charge(wanted: Charge, attempt: Annotated[RequestAttempt, Depends(idempotency)]):
    receipt = await attempt.step("charge", charge_card, wanted.amount, attempt.child_key("charge"))
    return {"receipt": receipt}


async def charge_card(amount, key):
    bank.append((amount, key))
    return f"receipt {len(bank)}"


# --- another rule for one route
@router.post("/refunds", status_code=201)
async def refund(
    wanted: Charge,
    _: Annotated[RequestAttempt, Depends(idempotency.but(key="required", on_error="hold"))],
):
    return {"refunded": wanted.amount}


# --- rows
class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "fastapi_orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


async def get_session():
    async with AsyncSession(engine, expire_on_commit=False) as session:
        yield session


together = Idempotency(store=store, scope=current_tenant, session=get_session)


class Wanted(BaseModel):
    item: str


@router.post("/orders", status_code=201, dependencies=[Depends(together)])
async def place_order(wanted: Wanted, session: Annotated[AsyncSession, Depends(get_session)]):
    order = Order(item=wanted.item)
    session.add(order)
    await session.flush()
    return {"order": order.id, "item": order.item}


# --- the app
@asynccontextmanager
async def lifespan(_app):
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield
    await store.aclose()
    await engine.dispose()


app = FastAPI(lifespan=lifespan)
app.include_router(router)


# --- as clients see it
async def main():
    transport = httpx.ASGITransport(app)
    async with lifespan(app):
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            await show(client)
        async with engine.begin() as connection:
            orders = await connection.scalar(sa.select(sa.func.count()).select_from(Order))
        print(orders, "orders")


async def show(client):
    key = str(uuid4())  # a new one: the ledger remembers the last run
    ann = {"X-API-Key": "key-of-ann", "Idempotency-Key": f'"{key}"'}

    first = await client.post("/orders", json={"item": "book"}, headers=ann)
    again = await client.post("/orders", json={"item": "book"}, headers=ann)
    assert (first.status_code, first.content) == (again.status_code, again.content)
    assert again.headers["Idempotent-Replayed"] == "true"

    other = await client.post("/orders", json={"item": "pen"}, headers=ann)
    assert (other.status_code, other.json()["type"]) == (422, "urn:semel:problem:key-reused")

    locked_out = ann | {"X-API-Key": "key-of-nobody"}
    refused = await client.post("/orders", json={"item": "book"}, headers=locked_out)
    assert refused.status_code == 401

    without = {"X-API-Key": "key-of-ann"}
    assert (await client.post("/refunds", json={"amount": 5}, headers=without)).status_code == 400
    charged = await client.post("/charges", json={"amount": 5}, headers=without)
    assert charged.json() == {"receipt": "receipt 1"}


if __name__ == "__main__":
    asyncio.run(main())
