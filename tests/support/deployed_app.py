"""A gateway, a room server and an API in one process, as docs/how-to/deploy-behind.md deploys them.

    uvicorn --factory support.deployed_app:app

`$WEB_STORE` is the store, `$WEB_FOLDER` the folder of the file `effects`, which has one line per
payment.
"""

from __future__ import annotations

import os
from pathlib import Path

import semel
from semel.http import IdempotencyMiddleware, Rule
from semel.http.sse import Gateway
from semel.http.ws import RoomDoor
from semel.rooms import Accepted, Room, Rooms

HEARTBEAT_S = 0.25


class Counter(Room):
    """Counts the actions of all members."""

    def begin(self, room_id):
        return {"count": 0}

    def apply(self, state, action, ctx):
        return Accepted({"count": state["count"] + 1}, reply=state["count"] + 1)

    def view(self, state, viewer):
        return state


def app():
    store = semel.connect(os.environ["WEB_STORE"])
    gateway = Gateway(store, base="/jobs", unknown="wait", heartbeat_s=HEARTBEAT_S)
    door = RoomDoor(
        Rooms(store, Counter(), name="counter"),
        authorise=lambda visitor, room_id: visitor.token,
        heartbeat_s=HEARTBEAT_S,
    )
    api = IdempotencyMiddleware(
        pay,
        store=store,
        scope=lambda request: "shop",
        routes={"/payments": Rule(key="required"), "/*": Rule()},
    )

    async def serve(scope, receive, send):
        if scope["type"] == "websocket":
            await door(scope, receive, send)
        elif scope["path"].startswith("/jobs/"):
            await gateway(scope, receive, send)
        else:
            await api(scope, receive, send)

    return serve


async def pay(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    if scope["method"] in ("POST", "PUT"):
        with (Path(os.environ["WEB_FOLDER"]) / "effects").open("a") as bank:
            bank.write(f"{os.getpid()}\n")
    body = b"%d" % os.getpid()
    head = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 201, "headers": head})
    await send({"type": "http.response.body", "body": body})
