"""Routers that run while a block does, and what they have done."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from semel.bus import Router
from semel.bus.jobs import shard_stream_of, stream_of
from semel.colour import ASYNC


@contextlib.asynccontextmanager
async def running(*routers: Router) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(router.run()) for router in routers]
    try:
        yield
        for router in routers:
            router.stop()
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], Any], what: str, within_s: float = 20.0) -> None:
    """Ask until the answer is yes; it may have to be awaited."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while True:
                answer = condition()
                if await answer if asyncio.iscoroutine(answer) else answer:
                    return
                await asyncio.sleep(0.005)
    raise AssertionError(f"waited {within_s:g} s for {what}")


async def told(store: Any, job_id: str, domain: str = "scan") -> list[tuple[str, int, Any]]:
    """The job's events, as whoever watches it is told of them."""
    page = await store.log(ASYNC).read(stream_of(domain, job_id))
    events = [json.loads(entry.data) for entry in page.entries]
    return [(event["stage"], event["seq"], event["data"]) for event in events]


async def waiting(store: Any, shards: int, domain: str = "scan") -> int:
    """How many events wait for a router."""
    log, count = store.log(ASYNC), 0
    for shard in range(shards):
        stream = shard_stream_of(domain, shard)
        page = await log.read(stream)
        floor = page.floor.offset if page.floor else 0
        count += page.head.offset - floor
    return count
