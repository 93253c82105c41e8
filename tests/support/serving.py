"""An ASGI app behind uvicorn, on the event loop of the test."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvicorn

from support.process import HOST
from support.web import until

__all__ = ["serving"]


@contextlib.asynccontextmanager
async def serving(app, http="httptools", *, buffer=None, **settings):
    """Yield a server on this event loop, and its URL. `buffer`: SO_SNDBUF of its sockets."""
    with socket.create_server((HOST, 0)) as sock:
        if buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        settings = {"ws": "none", "log_config": None, "timeout_graceful_shutdown": 1, **settings}
        config = uvicorn.Config(app, http=http, **settings)
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve(sockets=[sock]))
        await until(lambda: server.started)
        try:
            yield f"http://{HOST}:{sock.getsockname()[1]}", server
        finally:
            server.should_exit = True
            await running
