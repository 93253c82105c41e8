"""The gateway: a job's events in a browser, in order, also after a reconnect.

    app = Gateway("redis://localhost", domain="scan", authorise=viewer_of)

    GET /{job_id}   with Accept: text/event-stream, what happens; without, the state as JSON

It is an ASGI app: on its own, mounted in Starlette or FastAPI, or as `semel gateway`. A viewer
comes back with `Last-Event-ID` (a browser's `EventSource` does so by itself), `?after=` or
`?last_seq=`, and gets what it has missed; where that cannot be had, a `reset` with the state.

    frames     what goes over the wire
    asking     what a request asks for
    visit      one request
    viewer     one connection
    direct     writing to it without waking it, under uvicorn
    crowd      all of them
    view       what somebody is shown
    tickets    for those who cannot send a header
    limits     how much it takes on

The easy mistake is a slow client. We stop writing to it, and cut it off; but what its server has
buffered for it stays until the peer has taken it, unless the server can drop a connection. Under
uvicorn, `abortable(app)` lets it; `semel gateway` does so. Elsewhere such a connection keeps up to
a chunk and a server's buffer, some 150 KiB, until TCP gives it up.
"""

from typing import TYPE_CHECKING

from semel.http.protocol import Refusal, Request
from semel.http.sse.abort import abortable
from semel.http.sse.gateway import Gateway
from semel.http.sse.limits import Limits
from semel.http.sse.problems import forbidden, unauthorised
from semel.http.sse.status import GatewayStatus
from semel.http.sse.tickets import Ticket, Tickets
from semel.imports import importing

__all__ = [
    "Gateway",
    "GatewayStatus",
    "Limits",
    "Refusal",
    "Request",
    "Ticket",
    "Tickets",
    "abortable",
    "forbidden",
    "unauthorised",
]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__)
