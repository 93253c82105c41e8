"""`python -m bench.realtime_app KIND PORT [STORE]`: what subscribers and messages are sent to.

`floor` writes the same bytes to every socket and knows nothing else. `sse-starlette` is what its
documentation shows: a queue for each client, in memory, and nothing to come back to. `semel` is an
app that publishes and shows in one process, and tells what its gateway has counted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import asdict
from typing import Any

from semel.bus import Stages

HOST = "127.0.0.1"

# More events of one job than anybody has, but none ends it.
STAGES = Stages({"vision": (10, 1_000_000), "done": (1_000_001, 1_000_002)})

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\n"
DONE = b"HTTP/1.1 204 No Content\r\n\r\n"


class Floor(asyncio.Protocol):
    """A connection that listens, or one that messages are posted on."""

    listening: set[asyncio.WriteTransport]

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        self.listening.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"GET"):
            self._transport.write(HEAD)
            self.listening.add(self._transport)
            return
        _, _, body = data.partition(b"\r\n\r\n")
        frame = b"event: progress\ndata: " + body + b"\nid: 1.0123456789ab\n\n"
        for transport in self.listening:
            transport.write(frame)
        self._transport.write(DONE)


async def floor(port: int) -> None:
    Floor.listening = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Floor, HOST, port, backlog=2048)
    await server.serve_forever()


async def sse_starlette(port: int) -> None:
    from sse_starlette import EventSourceResponse
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    queues: set[asyncio.Queue[str]] = set()

    async def events(queue: asyncio.Queue[str]) -> AsyncIterator[dict[str, str]]:
        try:
            while True:
                yield {"event": "progress", "data": await queue.get()}
        finally:
            queues.discard(queue)

    async def subscribe(_request: Request) -> Response:
        queue: asyncio.Queue[str] = asyncio.Queue()
        queues.add(queue)
        return EventSourceResponse(events(queue))

    async def publish(request: Request) -> Response:
        said = (await request.body()).decode()
        for queue in queues:
            queue.put_nowait(said)
        return Response(status_code=204)

    routes = [Route("/jobs/{id}", subscribe), Route("/publish", publish, methods=["POST"])]
    await serve(Starlette(routes=routes), port)


async def semel(port: int, store: str) -> None:
    from semel.bus import Publisher
    from semel.http.sse import Gateway, abortable
    from semel.settings import as_log_store

    opened = as_log_store(store)
    gateway, publisher = Gateway(opened, base="/jobs"), Publisher(opened, stages=STAGES)
    numbers = itertools.count(STAGES.next_seq("vision"))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/jobs/"):
            await gateway(scope, receive, send)
            return
        said = b""
        if scope["method"] == "POST":
            job_id = scope["path"].rpartition("/")[2]
            data = json.loads((await receive())["body"])
            await publisher.publish(job_id, "vision", next(numbers), data)
        else:
            said = json.dumps(asdict(gateway.status())).encode()
        headers = [(b"content-length", str(len(said)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": said})

    await serve(abortable(app), port)


async def serve(app: Any, port: int) -> None:
    """Under uvicorn, as it comes: one worker, uvloop and httptools."""
    import uvicorn

    settings = uvicorn.Config(app, host=HOST, port=port, log_level="error", access_log=False)
    await uvicorn.Server(settings).serve()


KINDS: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "floor": floor,
    "sse-starlette": sse_starlette,
    "semel": semel,
}


def main(kind: str, port: str, *words: str) -> None:
    import uvloop

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    uvloop.run(KINDS[kind](int(port), *words))


if __name__ == "__main__":
    main(*sys.argv[1:])
