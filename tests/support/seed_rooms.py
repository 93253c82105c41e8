"""The table server as it was first written: its snippets, to the letter where they can be run."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

logger = logging.getLogger("seed")


# --- a request that comes again -----------------------------------------------------------------


async def answered(
    redis: Any,
    table_id: str,
    user_id: str,
    request_id: str,
    process_action: Callable[[], Awaitable[Any]],
) -> Any:
    idempotency_key = f"{table_id}:{user_id}:{request_id}"

    if await redis.exists(idempotency_key):
        return await redis.get(idempotency_key)
    result = await process_action()
    await redis.setex(idempotency_key, 300, json.dumps(result))
    return result


class IdempotencyStore:
    def __init__(self, redis: Any) -> None:
        self.redis = redis
        self.ttl = 300

    async def check_and_set(self, key: str, result: Any) -> Any:
        cached = await self.redis.get(key)
        if cached:
            return json.loads(cached)

        await self.redis.setex(key, self.ttl, json.dumps(result))
        return None


# --- versions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableState:
    count: int = 0
    state_version: int = 0


class TableStateManager:
    def __init__(self, table_id: str) -> None:
        self.table_id = table_id
        self._version = 0
        self._state = TableState()
        self._lock = asyncio.Lock()

    async def apply_transition(self, transition: Callable[[TableState], TableState]) -> TableState:
        async with self._lock:
            self._version += 1
            new_state = transition(self._state)
            new_state = replace(new_state, state_version=self._version)
            self._state = new_state
            return new_state


class Client:
    """`handleStateUpdate`, in Python; what it would have asked for is counted."""

    def __init__(self, version: int, state: Any) -> None:
        self.version = version
        self.state = state
        self.snapshots_asked = 0

    def handle_state_update(self, update: dict[str, Any]) -> None:
        if update["previousVersion"] == self.version:
            self.state = update["state"]
            self.version = update["stateVersion"]
            return

        if update["stateVersion"] <= self.version:
            return

        if update["previousVersion"] > self.version:
            self.snapshots_asked += 1
            return


# --- one after another --------------------------------------------------------------------------


class TableProcessor:
    def __init__(self, table_id: str, process: Callable[[Any], Awaitable[None]]) -> None:
        self.table_id = table_id
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self._process_request = process
        self.task = asyncio.create_task(self._process_loop())

    async def _process_loop(self) -> None:
        while True:
            request = await self.queue.get()
            try:
                await self._process_request(request)
            except Exception as e:  # noqa: BLE001 - as it was written
                logger.error(f"Error processing request: {e}")  # noqa: G004, TRY400
            finally:
                self.queue.task_done()

    async def submit(self, request: Any) -> None:
        await self.queue.put(request)


class ConcurrentActionError(Exception):
    pass


async def locked(
    redis: Any, table_id: str, user_id: str, do_process: Callable[[], Awaitable[Any]]
) -> Any:
    lock_key = f"action_lock:{table_id}:{user_id}"

    if not await redis.set(lock_key, "1", nx=True, ex=5):
        raise ConcurrentActionError

    try:
        return await do_process()
    finally:
        await redis.delete(lock_key)


# --- turns --------------------------------------------------------------------------------------


class Table:
    """As one process has it."""

    def __init__(self, players: int) -> None:
        self.players = players
        self.current_turn = 0
        self.lock = asyncio.Lock()
        self.folded: list[int] = []

    def play(self) -> None:
        self.current_turn = (self.current_turn + 1) % self.players

    async def handle_turn_timeout(self, position: int) -> None:
        async with self.lock:
            if self.current_turn != position:
                return

            self.folded.append(position)
            self.play()
