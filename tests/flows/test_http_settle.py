"""A request that nobody knows the end of is settled by hand, and answered so."""

from __future__ import annotations

import json

import httpx
import pytest

from semel import admin
from semel.admin import Admin, Recovered, Retry
from semel.http import IdempotencyMiddleware, Rule
from semel.keys import HTTP
from semel.stores import SQLiteStore

KEY = {"Idempotency-Key": '"k"'}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "semel.db"


@pytest.fixture
def desk(path):
    with Admin(f"sqlite:///{path}") as desk:
        yield desk


@pytest.fixture
async def client(path):
    """A door that holds what failed; its handler fails until it is told to work."""
    runs: list[str] = []

    async def app(scope, receive, send):
        runs.append(scope["path"])
        if len(runs) == 1:
            raise ConnectionError("the bank did not answer")
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made"})

    store = SQLiteStore(path)
    door = IdempotencyMiddleware(app, store=store, scope="shop", rule=Rule(on_error="hold"))
    transport = httpx.ASGITransport(door, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        client.runs = runs
        assert (await client.post("/orders", headers=KEY)).status_code == 500
        assert (await client.post("/orders", headers=KEY)).status_code == 409
        yield client
    await store.aclose()


def settle(desk, settlement, **more):
    answer = desk.resolve("k", settlement, tenant="shop", version=HTTP, **more)
    assert isinstance(answer, admin.Changed)


async def test_what_was_held_can_be_told_to_have_happened(client, desk):
    settle(desk, Recovered({"order": 7}), status=201)
    answer = await client.post("/orders", headers=KEY)
    assert (answer.status_code, answer.json()) == (201, {"order": 7})
    assert answer.headers["idempotent-replayed"] == "true"
    assert len(client.runs) == 1


async def test_without_a_status_it_is_200(client, desk):
    settle(desk, Recovered(None))
    answer = await client.post("/orders", headers=KEY)
    assert (answer.status_code, answer.json()) == (200, None)


async def test_what_was_held_can_be_told_to_have_failed(client, desk):
    settle(desk, admin.ReplayedError("the bank refused"))
    answer = await client.post("/orders", headers=KEY)
    assert answer.status_code == 500
    assert answer.json()["type"] == "urn:semel:problem:interrupted"
    assert "the bank refused" in answer.json()["detail"]
    assert len(client.runs) == 1


async def test_what_was_held_can_be_let_run(client, desk):
    settle(desk, Retry())
    answer = await client.post("/orders", headers=KEY)
    assert (answer.status_code, answer.content) == (201, b"made")
    assert len(client.runs) == 2


async def test_a_value_that_is_no_json_is_told_to_be_lost(client, desk):
    settle(desk, Recovered({1, 2}))
    answer = await client.post("/orders", headers=KEY)
    assert answer.status_code == 410
    assert json.loads(answer.content)["type"] == "urn:semel:problem:response-not-kept"


async def test_a_recorded_response_can_be_read_by_people(client, desk):
    settle(desk, Retry())
    await client.post("/orders", headers=KEY)
    story = desk.explain("k", tenant="shop", version=HTTP)
    assert story.outcome.text == "201 | made"
    assert story.record.outcome.status == 201
    assert story.record.key.operation == "POST /orders"


async def test_a_guard_of_the_same_key_is_not_blocked_by_a_client(client, desk, path):
    assert desk.explain("k", tenant="shop") is None
