"""Questions to single servers: which there are, and what each says of itself."""

from __future__ import annotations

from typing import Any

import redis

from semel.stores.redis.durability import Standing
from semel.stores.redis.faults import BROKEN, refused_command, unreachable
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
        raise refused_command(error) from error
    except BROKEN as error:
        raise unreachable(error) from error


async def standing(line: Line, server: Any) -> Standing:
    """The settings that say what the server remembers."""
    role = await _if_permitted(line, server, "INFO", "replication")
    memory = await _if_permitted(line, server, "INFO", "memory")
    appendonly = await _setting(line, server, "appendonly")
    return Standing(
        appendonly=None if appendonly is None else appendonly == "yes",
        appendfsync=await _setting(line, server, "appendfsync") or "",
        snapshots=bool(await _setting(line, server, "save")),
        maxmemory=None if memory is None else int(memory.get("maxmemory", 0)),
        policy="" if memory is None else str(memory.get("maxmemory_policy", "")),
        replicas=None if role is None else int(role.get("connected_slaves", 0)),
        is_replica=role is not None and role.get("role") == "slave",
    )


async def _setting(line: Line, server: Any, name: str) -> str | None:
    """A setting, None when the server does not say: managed ones refuse CONFIG."""
    answer = await _if_permitted(line, server, "CONFIG GET", name)
    return next((_plain(value) for value in (answer or {}).values()), None)


async def _if_permitted(line: Line, server: Any, *command: str) -> Any:
    """Return the server's reply, or None if it refuses the command."""
    try:
        return await line.ask(server, *command)
    except redis.ResponseError:
        return None
    except BROKEN as error:
        raise unreachable(error) from error


def _plain(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
