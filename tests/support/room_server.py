"""A server of one table that does what it is told, over real sockets: it speaks WebSocket.

Each connection plays the next part; the last part is played for all that follow. A part is an async
function that is given a `Seat`: it says, hears, and cuts.
"""

from __future__ import annotations

import asyncio
import json

from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

from support.process import HOST
from support.room_vectors import joined, message, snapshot

# Whatever should come at once takes far less, and what does not is noticed.
AT_ONCE_S = 5.0


class Seat:
    """One connection, from the server's side."""

    def __init__(self, socket):
        self.socket = socket

    async def say(self, said, request_id=None):
        said = said if request_id is None else {**said, "requestId": request_id}
        await self.socket.send(said if isinstance(said, (str, bytes)) else json.dumps(said))

    async def hear(self, kind=None):
        async with asyncio.timeout(AT_ONCE_S):
            said = json.loads(await self.socket.recv())
        assert kind in {None, said["type"]}, said
        return said

    async def let_in(self, **told):
        """Answer a join; the join."""
        join = await self.hear("JOIN")
        await self.say(joined(**told), join["requestId"])
        return join

    async def show(self, version, state, **told):
        """Answer a join with a snapshot; the join."""
        join = await self.let_in(head=version, viewer=told.get("viewer"))
        await self.say(snapshot(version=version, state=state, **told))
        return join

    async def refuse(self, code, **told):
        join = await self.hear("JOIN")
        await self.say(message("ERROR", {"code": code, "message": "no", **told}), join["requestId"])
        return join

    async def close(self, code=1000):
        await self.socket.close(code)

    def cut(self):
        self.socket.transport.abort()

    async def stay(self):
        """Until the client hangs up; what it says meanwhile."""
        heard = []
        try:
            while True:
                heard.append(json.loads(await self.socket.recv()))
        except ConnectionClosed:
            return heard


class Script:
    """`async with Script(part, part) as server`: an error in a part is raised at the end."""

    def __init__(self, *parts):
        self.parts = list(parts)
        self.seats = []
        self.errors = []
        self.open = 0
        self.changed = asyncio.Condition()

    async def __aenter__(self):
        self._server = await serve(self._play, HOST, 0, close_timeout=0.1, ping_interval=None)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"ws://{HOST}:{port}/rooms"
        return self

    async def __aexit__(self, *error):
        self._server.close()
        await self._server.wait_closed()
        if error[0] is None and self.errors:
            raise self.errors[0]

    async def _play(self, socket):
        seat = Seat(socket)
        self.seats.append(seat)
        await self._count(+1)
        part = self.parts.pop(0) if len(self.parts) > 1 else self.parts[0]
        try:
            await part(seat)
        except ConnectionClosed:
            pass
        except Exception as error:  # noqa: BLE001 - raised where the script ends
            self.errors.append(error)
        finally:
            await self._count(-1)

    async def _count(self, by):
        async with self.changed:
            self.open += by
            self.changed.notify_all()

    async def empty(self):
        """Every client has hung up."""
        async with asyncio.timeout(AT_ONCE_S), self.changed:
            await self.changed.wait_for(lambda: self.open == 0)
