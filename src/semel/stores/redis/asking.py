"""Questions to single servers: which there are, and what each says of itself."""

from __future__ import annotations

from typing import Any

import redis

from semel.errors import StoreUnavailableError
from semel.stores.redis.durability import Standing
from semel.stores.redis.faults import BROKEN, unreachable
from semel.stores.redis.line import Line


async def servers(line: Line) -> list[Any]:
    """Every server that holds records."""
    found: list[Any] = await _asked(line.servers())
    return found


async def ask(line: Line, server: Any, *command: Any) -> Any:
    return await _asked(line.ask(server, *command))


async def _asked(question: Any) -> Any:
    try:
        return await question
    except redis.ResponseError as error:
        raise StoreUnavailableError(f"Redis refused: {error}") from error
    except BROKEN as error:
        raise unreachable(error) from error


async def standing(line: Line, server: Any) -> Standing:
    """The settings that say what the server remembers."""
    role = await ask(line, server, "INFO", "replication")
    memory = await ask(line, server, "INFO", "memory")
    appendonly = await _setting(line, server, "appendonly")
    return Standing(
        appendonly=None if appendonly is None else appendonly == "yes",
        appendfsync=await _setting(line, server, "appendfsync") or "",
        snapshots=bool(await _setting(line, server, "save")),
        maxmemory=int(memory.get("maxmemory", 0)),
        policy=str(memory.get("maxmemory_policy", "")),
        replicas=int(role.get("connected_slaves", 0)),
        is_replica=role.get("role") == "slave",
    )


async def _setting(line: Line, server: Any, name: str) -> str | None:
    """A setting, None when the server does not say: managed ones refuse CONFIG."""
    try:
        answer = await line.ask(server, "CONFIG GET", name)
    except redis.ResponseError:
        return None
    except BROKEN as error:
        raise unreachable(error) from error
    return next((_plain(value) for value in answer.values()), None)


def _plain(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
