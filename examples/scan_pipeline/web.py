"""The page, and what its buttons do. How a scan goes on, the page hears from the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from crew import Crew
from fastapi import APIRouter, FastAPI, HTTPException
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from pieces import URL, opened, publisher
from pydantic import BaseModel, Field
from tray import Scan, Tray

from semel.colour import ASYNC
from semel.errors import IdempotencyConflictError, JobEndedError
from semel.ports import LogStore

PAGE = Path(__file__).parent / "page"


def make_app(crew: Crew, gateway_url: str) -> FastAPI:
    store = opened(URL)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        crew.start()
        yield
        await crew.end()
        await store.aclose()

    app = FastAPI(title="Scans", lifespan=lifespan)

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return (PAGE / "index.html").read_text().replace("GATEWAY", gateway_url)

    app.mount("/page", StaticFiles(directory=PAGE))
    app.include_router(starting(store))
    app.include_router(counting(store, crew))
    app.include_router(killing(crew))
    return app


# --- starting
class Wanted(BaseModel):
    """What is to be scanned."""

    picture: str = Field(max_length=40)


def starting(store: LogStore) -> APIRouter:
    router, tray, events = APIRouter(), Tray(store), publisher(store)

    @router.put("/scans/{scan_id}", status_code=202)
    async def start(scan_id: str, wanted: Wanted) -> None:
        """The page chooses the id, and sends the same again until it is answered."""
        try:
            # First the event: whoever watches a scan that waits finds it there.
            await events.publish(scan_id, "queued", 0, {"note": f"a {wanted.picture} waits"})
            await tray.put(Scan(scan_id, wanted.picture))
        except IdempotencyConflictError as error:
            raise HTTPException(409, str(error)) from error
        except JobEndedError:
            pass  # asked for again, hours later

    return router


# --- counting
def counting(store: LogStore, crew: Crew) -> APIRouter:
    router, log = APIRouter(), store.log(ASYNC)

    @router.get("/tally")
    async def tally() -> dict[str, object]:
        """Who works, and how often points were given: once for each scan that is done."""
        [head] = await log.heads(["scan:rewards"])
        return {"workers": sorted(crew.workers), "rewards": head.offset}

    return router


# --- killing
def killing(crew: Crew) -> APIRouter:
    router = APIRouter()

    @router.delete("/workers/{name}", status_code=204)
    async def kill_worker(name: str) -> None:
        if not crew.kill_worker(name):
            raise HTTPException(404, f"there is no worker {name} any more")

    @router.delete("/gateway", status_code=204)
    async def kill_gateway() -> None:
        if not crew.kill("gateway"):
            raise HTTPException(404, "the gateway is not there just now")

    return router
