"""Whom connections to one server are borrowed from: a client's pool, or one server of a cluster."""

from __future__ import annotations

import contextlib
from typing import Any

import redis

from semel.stores.redis.wire import room


async def make_ready(connection: Any) -> None:
    """Open it, if it is not; make sure that it can be spoken on."""
    await connection.connect()
    # A connection that was reset while it lay in the pool passes for an open one.
    if connection._writer.transport.is_closing():  # noqa: SLF001
        await connection.disconnect(nowait=True)
        await connection.connect()
    await connection.check_health()


class FromPool:
    """Borrows from a client's pool."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.keeps = room(pool) > 0

    async def lend(self) -> Any:
        connection = await self._pool.get_connection()
        try:
            await make_ready(connection)
        except BaseException:
            await self.take_back(connection)
            raise
        return connection

    async def take_back(self, connection: Any) -> None:
        with contextlib.suppress(KeyError):  # the pool was reset meanwhile
            await self._pool.release(connection)


class FromNode:
    """Borrows from one server of a cluster client."""

    keeps = True

    def __init__(self, client: Any, name: str) -> None:
        self._client = client
        self._name = name
        self._node: Any = None

    async def lend(self) -> Any:
        self._node = self._client.get_node(node_name=self._name)
        if self._node is None:
            raise redis.ConnectionError(f"{self._name} is no longer part of the cluster")
        connection = self._node.acquire_connection()
        try:
            await make_ready(connection)
        except BaseException:
            await connection.disconnect(nowait=True)
            self._node.release(connection)
            raise
        return connection

    async def take_back(self, connection: Any) -> None:
        self._node.release(connection)
