"""`python -m bench.rooms_app PORT`: rooms in a dict, told by a loop over their connections.

What the server and Python cost without us: the same uvicorn with the same settings, and messages of
the same form and size. It keeps nothing, checks nothing, and whoever was away has missed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sys
from collections import defaultdict
from typing import Any

HOST = "127.0.0.1"

_said = json.JSONEncoder(separators=(",", ":")).encode


class Floor:
    """An ASGI app."""

    def __init__(self) -> None:
        self._states: dict[str, dict[str, Any]] = {}
        self._here: defaultdict[str, dict[Any, None]] = defaultdict(dict)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        user, joined = "", ""
        with contextlib.suppress(OSError):
            while (message := await receive())["type"] == "websocket.receive":
                asked = json.loads(message["text"])
                payload = asked["payload"]
                if asked["type"] == "JOIN":
                    joined, user = payload["tableId"], payload.get("token", "")
                    await self._join(joined, send)
                else:
                    await self._act(asked["requestId"], payload, user, send)
        self._here[joined].pop(send, None)

    async def _join(self, room: str, send: Any) -> None:
        self._here[room][send] = None
        new = {"room": room, "count": 0, "note": "", "by": {}}
        state = self._states.setdefault(room, new)
        await _tell(send, "TABLE_SNAPSHOT", {"tableId": room, "state": state})

    async def _act(self, request_id: str, payload: Any, user: str, send: Any) -> None:
        room, note = payload["tableId"], payload["note"]
        state = self._states[room]
        by = state["by"].get(user, 0) + 1
        count = state["count"] + 1
        state |= {"count": count, "note": note, "by": {**state["by"], user: by}}
        patch = [[["count"], count], [["note"], note], [["by", user], by]]
        update = {
            "tableId": room,
            "stateVersion": count,
            "previousVersion": count - 1,
            "position": f"{count}.0123456789ab",
            "previous": f"{count - 1}.0123456789ab",
            "patch": patch,
            "events": [],
        }
        text = _said({"type": "TABLE_STATE_UPDATE", "payload": update})
        for each in list(self._here[room]):
            await each({"type": "websocket.send", "text": text})
        reply = {"count": count, "note": note}
        action = {"type": "add", "note": note}
        told = {"tableId": room, "success": True, "cached": False, "stateVersion": count}
        await _tell(
            send, "ACTION_RESULT", {**told, "action": action, "reply": reply}, requestId=request_id
        )


async def _tell(send: Any, kind: str, payload: Any, **more: str) -> None:
    await send(
        {"type": "websocket.send", "text": _said({"type": kind, **more, "payload": payload})}
    )


async def serve(port: int) -> None:
    import uvicorn

    settings = uvicorn.Config(
        Floor(),
        host=HOST,
        port=port,
        log_level="error",
        access_log=False,
        lifespan="off",
        ws="websockets-sansio",
        ws_per_message_deflate=False,
    )
    await uvicorn.Server(settings).serve()


def main(port: str) -> None:
    import uvloop

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(serve(int(port)))


if __name__ == "__main__":
    main(*sys.argv[1:])
