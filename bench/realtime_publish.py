"""Publishing: one worker after another event, and a hundred workers at once, in one process.

The floor is the script that people write for this, over redis-py: look whether the event was there,
XADD, state, marker, PUBLISH. It has no order of its own, no fence, and no position.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import redis.asyncio

from semel.bus import SEQ_RANGES, Publisher

SCRIPT = """
if redis.call('EXISTS', KEYS[3]) == 1 then
    return 0
end
redis.call('XADD', KEYS[1], 'MAXLEN', '~', '10000', '*', 'data', ARGV[1])
redis.call('SETEX', KEYS[2], tonumber(ARGV[2]), ARGV[1])
redis.call('SETEX', KEYS[3], tonumber(ARGV[3]), '1')
redis.call('PUBLISH', KEYS[4], ARGV[1])
return 1
"""

SHARDS = 4
STATE_S, MARKER_S = 3600, 7200
NOTE = "a" * 100

Publish = Callable[[str, str, int, dict[str, Any]], Coroutine[Any, Any, bool]]


@contextlib.asynccontextmanager
async def script(url: str, at_once: int) -> AsyncIterator[Publish]:
    async with redis.asyncio.Redis.from_url(url, max_connections=at_once) as client:
        sha = await client.script_load(SCRIPT)

        async def publish(job_id: str, stage: str, seq: int, data: dict[str, Any]) -> bool:
            shard = int(hashlib.md5(job_id.encode(), usedforsecurity=False).hexdigest(), 16)
            event = {
                "job_id": job_id,
                "domain": "scan",
                "stage": stage,
                "seq": seq,
                "data": data,
                "timestamp": datetime.now(UTC).isoformat(),
            }
            answer = await client.evalsha(
                sha,
                4,
                f"scan:events:{shard % SHARDS}",
                f"scan:state:{job_id}",
                f"published:{job_id}:{stage}:{seq}",
                f"scan:updates:{job_id}",
                json.dumps(event),
                STATE_S,
                MARKER_S,
            )
            return answer == 1

        yield publish


@contextlib.asynccontextmanager
async def semel(url: str, _at_once: int) -> AsyncIterator[Publish]:
    async with Publisher(url) as publisher:
        yield publisher.publish


ENTRANTS: dict[str, Callable[[str, int], AbstractAsyncContextManager[Publish]]] = {
    "floor: the bare script, redis-py": script,
    "**semel**": semel,
}


@dataclass
class Rates:
    """Events per second, by round."""

    by_round: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.by_round)


def ratio(of: Rates, to: Rates) -> float:
    return statistics.median(a / b for a, b in zip(of.by_round, to.by_round, strict=True))


_jobs = itertools.count()


async def _work(publish: Publish, until: float) -> int:
    """Whole jobs, one event after the other, but for the last: nothing ends here."""
    made = 0
    *stages, _ = SEQ_RANGES.items()
    while True:
        job_id = f"job-{next(_jobs)}"
        for stage, (first, last) in stages:
            for seq in range(first, last + 1):
                if time.perf_counter() >= until:
                    return made
                if not await publish(job_id, stage, seq, {"note": NOTE, "n": made}):
                    raise RuntimeError(f"{job_id} {stage} {seq} is said to be there already")
                made += 1


async def _block(publish: Publish, at_once: int, seconds: float) -> float:
    began = time.perf_counter()
    made = await asyncio.gather(*(_work(publish, began + seconds) for _ in range(at_once)))
    return sum(made) / (time.perf_counter() - began)


async def run(url: str, *, at_once: int, rounds: int, seconds: float) -> dict[str, Rates]:
    found = {name: Rates() for name in ENTRANTS}
    async with contextlib.AsyncExitStack() as stack:
        opened = {
            name: await stack.enter_async_context(enter(url, at_once))
            for name, enter in ENTRANTS.items()
        }
        for turn in range(-1, rounds):
            names = list(opened)
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                rate = await _block(opened[name], at_once, seconds)
                if turn >= 0:  # the one before pays for connections and scripts
                    found[name].by_round.append(rate)
    return found
