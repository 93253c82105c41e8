"""`python -m bench.http_app DOOR STORE PORT`: an app as people write it, behind one of the doors.

The doors are set up as their README says, with a Redis or a PostgreSQL, and with a scope that looks
at a header. Everything else is as FastAPI and uvicorn come: one worker, uvloop and httptools.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

USER = "x-user-id"
UNKNOWN = "anonymous"


class Charge(BaseModel):
    """What is asked for."""

    amount: int
    currency: str


class Handlers:
    """What is behind the door: a handler that does nothing, one that waits, and their count."""

    def __init__(self) -> None:
        self.runs = 0
        self.waiting = 0
        self._go_on = asyncio.Event()

    async def charge(self, asked: Charge) -> dict[str, int]:
        self.runs += 1
        return {"id": self.runs, "amount": asked.amount}

    async def hold(self, asked: Charge) -> dict[str, int]:
        self.waiting += 1
        await self._go_on.wait()
        return {"id": self.waiting, "amount": asked.amount}

    async def let_go(self) -> None:
        self._go_on.set()

    async def count(self) -> dict[str, int]:
        gc.collect()  # whoever asks wants to know what is in use, not what is left over
        return {"runs": self.runs, "waiting": self.waiting}


def new_app() -> FastAPI:
    app, handlers = FastAPI(), Handlers()
    app.post("/charges", status_code=201)(handlers.charge)
    app.post("/held", status_code=201)(handlers.hold)
    app.put("/held", status_code=204)(handlers.let_go)
    app.get("/count")(handlers.count)
    return app


# --- the doors ----------------------------------------------------------------------------------


def bare(_app: FastAPI, _store: str) -> None:
    """No door at all."""


def semel(app: FastAPI, store: str) -> None:
    from semel.http import IdempotencyMiddleware

    app.add_middleware(
        IdempotencyMiddleware,
        store=_semel_store(store),
        scope=lambda request: request.header(USER) or UNKNOWN,
    )


def _semel_store(url: str) -> Any:
    import semel

    if not url.startswith("postgres"):
        # Nothing that is not used is imported: what an app has loaded, its garbage collector
        # looks at.
        return semel.connect(url)
    from semel.stores.sql import SQLStore

    return SQLStore(url, create=True)


def idemkit(app: FastAPI, store: str) -> None:
    from idemkit import HttpConfig, IdempotencyMiddleware

    logging.getLogger("idemkit").setLevel(logging.ERROR)
    app.add_middleware(
        IdempotencyMiddleware,
        backend=_idemkit_backend(store),
        config=HttpConfig(scope=lambda request: request.headers.get(USER, UNKNOWN)),
    )


def _idemkit_backend(url: str) -> Any:
    from idemkit import PostgresBackend, RedisBackend

    if not url.startswith("postgres"):
        # With redis-py's own limit of 100 it answers 503 to some of 64 callers: it has sent a
        # response, and the next request is there, while it still records the last one.
        return RedisBackend.from_url(url, max_connections=CONNECTIONS)
    from idemkit.backends.postgres import init_pg

    asyncio.run(init_pg(url))
    return PostgresBackend.from_url(url)


CONNECTIONS = 1000

DOORS = {"bare": bare, "semel": semel, "idemkit": idemkit}


def main(door: str, store: str, port: str) -> None:
    app = new_app()
    DOORS[door](app, store)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", access_log=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
