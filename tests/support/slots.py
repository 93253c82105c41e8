"""Slots of a Redis Cluster that go from one server to another."""

from __future__ import annotations

from typing import Self

from support import servers
from support.process import HOST, wait_until
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
        """Mark the slot as moving, once each node knows the others' current epochs.

        A node that takes a slot raises its epoch above those it knows. If it does not know the
        epoch of the last owner yet, that owner's next message takes the slot back, and each of the
        two nodes redirects clients to the other for ever.
        """
        wait_until(self._epochs_are_known, "every node to know the epochs of the others")
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

    def _epochs_are_known(self) -> bool:
        return len({frozenset(_epochs(node.port).items()) for node in self.nodes}) == 1


def _epochs(port: int) -> dict[str, str]:
    """The configuration epoch of each node, as the node at `port` knows them."""
    rows = [row.split() for row in servers.command(port, "CLUSTER", "NODES").splitlines()]
    return {row[0]: row[6] for row in rows}
