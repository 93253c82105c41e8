"""Slots of a Redis Cluster that go from one server to another."""

from __future__ import annotations

from typing import Self

from support import servers
from support.process import HOST
from support.servers import SLOTS, RedisCluster


class Migration:
    """Moves one key's slot to another node of a cluster, in steps, and back in the end."""

    def __init__(self, cluster: RedisCluster, name: bytes) -> None:
        self.slot: int = servers.command(cluster.nodes[0].port, "CLUSTER", "KEYSLOT", name.decode())
        ids = {n.port: servers.command(n.port, "CLUSTER", "MYID") for n in cluster.nodes}
        self.nodes, self.ids = cluster.nodes, ids
        share = SLOTS / len(cluster.nodes)
        self.source = cluster.nodes[int(self.slot / share)]
        self.target = next(node for node in cluster.nodes if node is not self.source)

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.source, self.target = self.target, self.source
        self._begin()
        self.move_keys()
        self.finish()

    def _begin(self) -> None:
        slot = ("CLUSTER", "SETSLOT", self.slot)
        servers.command(self.target.port, *slot, "IMPORTING", self.ids[self.source.port])
        servers.command(self.source.port, *slot, "MIGRATING", self.ids[self.target.port])

    def move_keys(self, count: int = 100) -> None:
        keys = servers.command(self.source.port, "CLUSTER", "GETKEYSINSLOT", self.slot, count)
        for key in keys:
            servers.command(self.source.port, "MIGRATE", HOST, self.target.port, key, 0, 5000)

    def finish(self) -> None:
        owner = self.ids[self.target.port]
        for node in (self.target, self.source, *self.nodes):
            servers.command(node.port, "CLUSTER", "SETSLOT", self.slot, "NODE", owner)
