"""Attempts to break the doors for requests: each of these once succeeded."""

from typing import Annotated

import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Security
from fastapi.security import SecurityScopes

from semel.http.fastapi import Idempotency, IdempotentRoute, RequestAttempt
from semel.stores.memory import MemoryStore
from support.web import ask

GOOD = [(b"x-token", b"good")]
BAD = [(b"x-token", b"bad")]


@pytest.fixture
def store():
    return MemoryStore()


# --- who is shown a recorded response -----------------------------------------------------------


class Gate:
    """A FastAPI shop whose dependency lets in who has the token, and counts how often it did."""

    def __init__(self, store):
        self.idempotency = Idempotency(scope="shop", store=store)
        self.asked = 0
        self.runs = 0
        self.router = APIRouter(route_class=IdempotentRoute)

    def let_in(self, x_token: Annotated[str, Header()]):
        self.asked += 1
        if x_token != "good":
            raise HTTPException(401)
        return x_token

    def charge(self):
        self.runs += 1
        return {"receipt": self.runs}

    @property
    def app(self):
        app = FastAPI()
        app.include_router(self.router)
        return app


def in_the_route(gate):
    @gate.router.post("/pay", dependencies=[Depends(gate.let_in)])
    async def pay(_: Annotated[RequestAttempt, Depends(gate.idempotency)]):
        return gate.charge()


def beside_the_attempt(gate):
    def service(
        attempt: Annotated[RequestAttempt, Depends(gate.idempotency)],
        _: Annotated[str, Depends(gate.let_in)],
    ):
        return attempt

    @gate.router.post("/pay")
    async def pay(_: Annotated[RequestAttempt, Depends(service)]):
        return gate.charge()


def with_scopes(gate):
    def user(scopes: SecurityScopes, x_token: Annotated[str, Header()]):
        assert scopes.scopes == ["pay"]
        return gate.let_in(x_token)

    @gate.router.post("/pay")
    async def pay(
        _: Annotated[RequestAttempt, Depends(gate.idempotency)],
        __: Annotated[str, Security(user, scopes=["pay"])],
    ):
        return gate.charge()


def asked_anew_each_time(gate):
    @gate.router.post("/pay")
    async def pay(
        _: Annotated[RequestAttempt, Depends(gate.idempotency)],
        __: Annotated[str, Depends(gate.let_in, use_cache=False)],
    ):
        return gate.charge()


@pytest.mark.parametrize("overridden", [False, True], ids=["", "with overrides"])
@pytest.mark.parametrize(
    "place", [in_the_route, beside_the_attempt, with_scopes, asked_anew_each_time]
)
async def test_who_was_not_let_in_is_shown_nothing_whatever_was_wrong(store, place, overridden):
    gate = Gate(store)
    place(gate)
    app = gate.app
    if overridden:  # FastAPI then makes every dependency anew, from its signature
        app.dependency_overrides[object] = lambda: None

    first = await ask(app, key="k", headers=GOOD)
    assert (first.status, gate.asked, gate.runs) == (200, 1, 1)

    stranger = await ask(app, key="k", headers=BAD)
    assert (stranger.status, stranger.replayed) == (401, False)
    nobody = await ask(app, key="k")
    assert (nobody.status, nobody.replayed) == (422, False)
    assert [each["loc"] for each in nobody.json()["detail"]] == [["header", "x-token"]]
    new = await ask(app, key="new")
    assert new.status == 422

    again = await ask(app, key="k", headers=GOOD)
    assert (again.body, again.replayed) == (first.body, True)
    assert gate.runs == 1
