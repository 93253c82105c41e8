"""A server that says its name, and that the people on it may kill: they are here to see that.

In a real site there is nothing like it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# Nothing of the rooms' own: they never see it.
KILL = json.dumps({"type": "KILL"}, separators=(",", ":"))


class Mortal:
    """In front of an app for WebSockets. `name` is told to everybody who connects."""

    def __init__(self, app: App, name: str) -> None:
        self._app = app
        self._hello = json.dumps({"type": "SERVER", "payload": {"name": name}})

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        async def hear() -> Message:
            message = await receive()
            if message.get("text") == KILL:
                os.kill(os.getpid(), signal.SIGKILL)  # as if its machine was gone
            return message

        async def say(message: Message) -> None:
            await send(message)
            if message["type"] == "websocket.accept":
                await send({"type": "websocket.send", "text": self._hello})

        await self._app(scope, hear, say)
