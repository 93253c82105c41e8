"""Apps that are served by a real server in a process of its own, and can be watched from outside.

    uvicorn --factory support.http_app:charges      an effect per request, behind the door
    uvicorn --factory support.http_app:streams      Starlette with what breaks other doors

What they do is written to $WEB_FOLDER: `effects` has a line per execution. A request that says
`?until=NAME` is answered when a file of that name is there, and `?pause=SECONDS` after a while.
`?stream=whole` and `?stream=fails` are answered with a stream that waits in its middle.
The path says what its key means: `RULES`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
from pathlib import Path
from urllib.parse import parse_qs

from semel.http import IdempotencyMiddleware, Rule, attempt_of
from semel.stores.redis import RedisStore

LEASE_S = 0.6

# Long enough for a worker on a loaded machine to renew it in time.
STEADY_S = 1.5

RULES = {
    "/steady/*": Rule(lease=STEADY_S),
    "/brief/*": Rule(lease=LEASE_S),
    "/held/*": Rule(lease=LEASE_S, on_crash="hold"),
    "/waiting/*": Rule(wait=30, max_waiters=256),
    "/fail-release/*": Rule(lease=STEADY_S, on_error="release"),
    "/fail-store/*": Rule(lease=STEADY_S, on_error="store"),
    "/fail-hold/*": Rule(lease=STEADY_S, on_error="hold"),
    "/large/*": Rule(max_body=256 * 1024 * 1024),
}


def tenant_of(request):
    return request.header("x-tenant") or "shop"


def folder():
    return Path(os.environ["WEB_FOLDER"])


def store():
    """The store at $WEB_STORE; $WEB_PATIENCE is how long a Redis may stay silent."""
    url = os.environ["WEB_STORE"]
    if "WEB_PATIENCE" in os.environ:
        return RedisStore(url, timeout_s=float(os.environ["WEB_PATIENCE"]))
    return url


def door(app):
    return IdempotencyMiddleware(app, store=store(), scope=tenant_of, routes=RULES)


def charges():
    return door(charge)


async def charge(scope, receive, send):
    """Take a body, have an effect, and say so."""
    assert scope["type"] == "http"
    if scope["path"] == "/peak":
        return await answer(send, {"peak": peak_bytes(), "pid": os.getpid()})
    asked = parse_qs(scope["query_string"].decode())
    size, digest = await read(receive)
    attempt = attempt_of(scope)
    line = f"{attempt.key if attempt else '-'} {os.getpid()}"
    with (folder() / "effects").open("a") as file:
        file.write(line + "\n")  # one write of a short line is whole
    if "stream" in asked:
        return await stream(asked, send, first=attempt is None or attempt.number == 1)
    await linger(asked)
    receipt = hashlib.sha256(os.urandom(8)).hexdigest()
    pad = "x" * int(asked.get("pad", ["0"])[0])
    return await answer(
        send, {"receipt": receipt, "pid": os.getpid(), "size": size, "digest": digest, "pad": pad}
    )


async def read(receive):
    size, digest, more = 0, hashlib.sha256(), True
    while more:
        message = await receive()
        assert message["type"] == "http.request", message
        size += len(message.get("body", b""))
        digest.update(message.get("body", b""))
        more = message.get("more_body", False)
    return size, digest.hexdigest()


async def linger(asked):
    for seconds in asked.get("pause", ()):
        await asyncio.sleep(float(seconds))
    for name in asked.get("until", ()):
        while not (folder() / name).exists():
            await asyncio.sleep(0.01)


async def stream(asked, send, *, first):
    """Send half a stream; at first wait for its gate, and raise there if `?stream=fails`."""
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"half", "more_body": True})
    if first:
        await linger(asked)
        if asked["stream"] == ["fails"]:
            raise RuntimeError("in the middle of the stream")
    await send({"type": "http.response.body", "body": b" whole"})


async def answer(send, said, status=201):
    body = json.dumps(said).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def peak_bytes():
    """The most memory this process has had.

    Linux carries the peak of `getrusage` over from whoever started us; a Mac has no other.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


# --- Starlette ----------------------------------------------------------------------------------


def streams():
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.middleware.gzip import GZipMiddleware
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Mount, Route

    async def events(request):
        async def told():
            for number in range(5):
                yield f"data: {number} {await request.is_disconnected()}\n\n"
                await asyncio.sleep(0.02)

        return StreamingResponse(told(), media_type="text/event-stream")

    async def pay(request):
        with (folder() / "effects").open("a") as file:
            file.write(f"{request.headers.get('idempotency-key', '-')}\n")
        body = await request.body()
        return JSONResponse({"paid": "x" * 2000, "size": len(body), "by": os.urandom(8).hex()})

    async def hand_on(request, call_next):
        return await call_next(request)

    around = {
        "plain": [],
        "base": [Middleware(BaseHTTPMiddleware, dispatch=hand_on)],
        "gzip": [Middleware(GZipMiddleware, minimum_size=10)],
    }
    routes = [
        Route("/events", events, methods=["GET", "POST"]),
        Route("/pay", pay, methods=["POST"]),
    ]
    inside = [
        Mount(f"/{name}", Starlette(routes=routes, middleware=ways))
        for name, ways in around.items()
    ]
    return door(Starlette(routes=inside))
