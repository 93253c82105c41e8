"""The middleware on single routes of a plain Starlette app."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

import semel
from semel.colour import ASYNC
from semel.http import IdempotencyMiddleware, Refusal, Rule, attempt_of, problem
from semel.stores import MemoryStore


def customer_of(request):
    customer = request.header("x-customer")
    if customer is None:
        raise Refusal(problem("key-missing", "Who are you?"))
    return customer


class Shop:
    def __init__(self):
        self.store = MemoryStore()
        self.seen = []
        self.app = Starlette(
            routes=[
                Route("/pay", self.pay, methods=["GET", "POST"], middleware=[self.guard()]),
                Route(
                    "/strict",
                    self.pay,
                    methods=["POST"],
                    middleware=[self.guard(key="required", on_error="hold")],
                ),
                Route("/free", self.pay, methods=["POST"]),
                Route("/refuse", self.refuse, methods=["POST"], middleware=[self.guard()]),
                Mount(
                    "/shop/{name}",
                    routes=[Route("/pay", self.pay, methods=["POST"])],
                    middleware=[self.guard()],
                ),
            ]
        )

    def guard(self, **rule):
        return Middleware(
            IdempotencyMiddleware, store=self.store, scope=customer_of, rule=Rule(**rule)
        )

    async def pay(self, request: Request):
        self.seen.append(request.url.path)
        attempt = attempt_of(request)
        if attempt is not None:
            await semel.step("charge", self.seen.append, attempt.child_key("charge"))
        body = await request.body()
        task = BackgroundTask(self.seen.append, "mail")
        return JSONResponse({"paid": len(body)}, 201, background=task)

    async def refuse(self, _request: Request):
        self.seen.append("refused")
        raise HTTPException(409, "sold out")

    async def ask(self, path, *, key=None, method="POST", customer="ann", content=b"40"):
        headers = {}
        if key is not None:
            headers["idempotency-key"] = key
        if customer is not None:
            headers["x-customer"] = customer
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await client.request(method, path, headers=headers, content=content)


@pytest.fixture
def shop():
    return Shop()


@pytest.mark.parametrize("path", ["/pay", "/strict", "/shop/north/pay"])
async def test_a_guarded_route_takes_effect_once(shop, path):
    first, second = await shop.ask(path, key="k"), await shop.ask(path, key="k")
    assert (first.status_code, first.json()) == (201, {"paid": 2})
    assert (second.status_code, second.content) == (201, first.content)
    assert second.headers["idempotent-replayed"] == "true"
    assert shop.seen.count(path) == shop.seen.count("mail") == 1


async def test_the_other_routes_are_left_alone(shop):
    for _ in range(2):
        assert (await shop.ask("/free", key="k")).status_code == 201
        assert (await shop.ask("/pay", key="k", method="GET")).status_code == 201
        assert (await shop.ask("/pay")).status_code == 201
    assert shop.seen.count("/free") == 2
    assert shop.seen.count("/pay") == 4
    assert await shop.store.ledger(ASYNC).records() == []


async def test_each_route_has_its_rule(shop):
    missing = await shop.ask("/strict")
    assert (missing.status_code, missing.json()["type"]) == (400, "urn:semel:problem:key-missing")
    assert shop.seen == []


async def test_an_error_that_the_route_raises_is_answered_and_recorded(shop):
    first, second = await shop.ask("/refuse", key="k"), await shop.ask("/refuse", key="k")
    assert (first.status_code, first.text) == (second.status_code, second.text) == (409, "sold out")
    assert second.headers["idempotent-replayed"] == "true"
    assert shop.seen == ["refused"]


async def test_whose_key_it_is_is_asked_every_time(shop):
    await shop.ask("/pay", key="k")
    assert (await shop.ask("/pay", key="k", customer=None)).status_code == 400
    other = await shop.ask("/pay", key="k", customer="bob")
    assert "idempotent-replayed" not in other.headers


async def test_many_at_once_run_once(shop):
    answers = await asyncio.gather(*(shop.ask("/pay", key="k") for _ in range(20)))
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert shop.seen.count("/pay") == 1
