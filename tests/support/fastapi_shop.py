"""A shop on FastAPI: an app whose routes may be guarded, and how tests speak to it."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel

from semel.colour import ASYNC
from semel.http.fastapi import IdempotentRoute

TENANTS = {"secret-a": "a", "secret-b": "b"}


class Order(BaseModel):
    item: str
    amount: int


@dataclass
class Shop:
    """An app, what its handlers have seen, and its store."""

    app: FastAPI
    store: Any
    seen: list[Any] = field(default_factory=list)

    async def post(self, path="/orders", *, key=None, api_key="secret-a", **request):
        headers = {"x-api-key": api_key, **request.pop("headers", {})}
        if key is not None:
            headers["idempotency-key"] = key
        if not request:
            request = {"json": {"item": "book", "amount": 40}}
        return await self.ask("POST", path, headers=headers, **request)

    async def ask(self, method, path, **request):
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await client.request(method, path, **request)

    async def records(self):
        return await self.store.ledger(ASYNC).records()


def tenant(x_api_key: Annotated[str, Header()]) -> str:
    try:
        return TENANTS[x_api_key]
    except KeyError:
        raise HTTPException(401, "unknown API key") from None


def name(response):
    assert response.headers["content-type"] == "application/problem+json"
    said = response.json()
    assert said["status"] == response.status_code
    return said["type"].removeprefix("urn:semel:problem:")


def replayed(response):
    return response.headers.get("idempotent-replayed") == "true"


def new_app():
    app = FastAPI()
    app.router.route_class = IdempotentRoute
    return app
