"""The gateway, in a process of its own, so that it can be killed alone."""

from __future__ import annotations

import os
import socket
import sys

import uvicorn
from pieces import DOMAIN, FEED_URL

from semel.http.sse import Gateway, abortable

RETRY_MS = int(os.environ.get("SCAN_RETRY_MS", "1000"))

gateway = Gateway(
    FEED_URL,
    domain=DOMAIN,
    cors=os.environ.get("SCAN_ORIGIN"),  # the page comes from another port
    unknown="wait",  # a router may not have brought the first event yet
    retry_ms=(RETRY_MS, 2 * RETRY_MS),
)


class Server(uvicorn.Server):
    """Lets those who watch go before it closes; they come back to the next one."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await gateway.drain(within_s=0.5)
        await super().shutdown(sockets)


if __name__ == "__main__":
    port = int(sys.argv[1])
    Server(uvicorn.Config(abortable(gateway), port=port, log_level="warning")).run()
