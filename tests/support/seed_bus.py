"""The event bus as it was first written: its scripts and its filter, to the letter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

SHARD_COUNT = 1

IDEMPOTENT_XADD = """
local stream_key = KEYS[1]
local state_key = KEYS[2]
local publish_key = KEYS[3]
local event_data = ARGV[1]
local state_ttl = tonumber(ARGV[2])
local publish_ttl = tonumber(ARGV[3])

if redis.call('EXISTS', publish_key) == 1 then
    return 0
end

redis.call('XADD', stream_key, 'MAXLEN', '~', '10000', '*', 'data', event_data)
redis.call('SETEX', state_key, state_ttl, event_data)
redis.call('SETEX', publish_key, publish_ttl, '1')

return 1
"""

UPDATE_STATE = """
local state_key = KEYS[1]
local publish_key = KEYS[2]

if redis.call('EXISTS', publish_key) == 1 then
    return 0
end

redis.call('SETEX', state_key, tonumber(ARGV[2]), ARGV[1])
redis.call('SETEX', publish_key, tonumber(ARGV[3]), '1')

return 1
"""

STREAM = "scan:events:0"


def event(job_id: str, stage: str, seq: int, data: Any = None) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "domain": "scan",
        "stage": stage,
        "seq": seq,
        "data": data,
        "timestamp": datetime.now(UTC).isoformat(),
    }


async def publish_event(
    redis: Any,
    job_id: str,
    stage: str,
    seq: int,
    data: Any = None,
    *,
    script: str = IDEMPOTENT_XADD,
    state_ttl: int = 3600,
) -> bool:
    shard = int(hashlib.md5(job_id.encode()).hexdigest(), 16) % SHARD_COUNT
    result = await redis.eval(
        script,
        3,
        f"scan:events:{shard}",
        f"scan:state:{job_id}",
        f"published:{job_id}:{stage}:{seq}",
        json.dumps(event(job_id, stage, seq, data)),
        state_ttl,
        7200,
    )
    return result == 1


async def route(redis: Any, told: dict[str, Any]) -> bool:
    """What the router does with an event: the state, and then everybody who is there."""
    job_id, seq = told["job_id"], told["seq"]
    keys = f"scan:state:{job_id}", f"router:published:{job_id}:{seq}"
    changed = await redis.eval(UPDATE_STATE, 2, *keys, json.dumps(told), 3600, 7200) == 1
    if changed:
        await redis.publish(f"scan:{job_id}", json.dumps(told))
    return changed


async def state_of(redis: Any, job_id: str) -> dict[str, Any] | None:
    held = await redis.get(f"scan:state:{job_id}")
    return json.loads(held) if held else None


async def subscribe(
    events: AsyncIterator[dict[str, Any]], last_seq: int = 0
) -> AsyncIterator[dict[str, Any]]:
    async for event in events:
        event_seq = event.get("seq", 0)
        if event_seq <= last_seq:
            continue
        yield event
        last_seq = event_seq
