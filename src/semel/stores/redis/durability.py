"""What a Redis promises to remember, from what it says about itself.

The strict reading: `process_crash` means that the server may be killed too; a claim it
acknowledged must still be there when it is back. A snapshot taken now and then does not do that,
so RDB alone promises nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semel.values import Guarantees, Survives

ASYNCHRONOUS = (
    "failover: replication is asynchronous, so a replica that takes over can have missed a claim "
    "that was acknowledged"
)


@dataclass(frozen=True, slots=True)
class Standing:
    """One server's settings. None: it did not let us see them."""

    appendonly: bool | None
    appendfsync: str
    snapshots: bool
    maxmemory: int
    policy: str
    replicas: int
    is_replica: bool = False


def guarantees_of(store: str, servers: Sequence[Standing], *, can_fail_over: bool) -> Guarantees:
    """What all the servers promise together: the least that any of them does."""
    promises = [_promised(server) for server in servers]
    survives = frozenset[Survives].intersection(*(kept for kept, _ in promises))
    why = [line for _, lines in promises for line in lines]
    why.append(_about_failover(servers, can_fail_over))
    # What voids everything is said first.
    why.sort(key=lambda line: not line.startswith("eviction"))
    return Guarantees(store, survives, shared=True, why=tuple(dict.fromkeys(why)))


def _promised(server: Standing) -> tuple[frozenset[Survives], list[str]]:
    kept, lines = _kept_on_disk(server)
    if server.maxmemory and server.policy != "noeviction":
        lines.insert(
            0,
            f"eviction: maxmemory-policy {server.policy} forgets records when memory is short, "
            "which voids every promise; set maxmemory-policy noeviction",
        )
        kept = frozenset()
    return kept, lines


def _kept_on_disk(server: Standing) -> tuple[frozenset[Survives], list[str]]:
    if server.appendonly is None:
        return frozenset(), ["the server refuses CONFIG GET: its settings cannot be checked"]
    if not server.appendonly:
        return frozenset(), [_without_log(server)]
    if server.appendfsync == "always":
        both: frozenset[Survives] = frozenset(("process_crash", "power_loss"))
        return both, ["appendonly with appendfsync always: on disk before it is acknowledged"]
    line = (
        f"power loss: appendfsync {server.appendfsync} acknowledges before the disk has it (a "
        "second or two; with `no`, as long as the system likes); set appendfsync always"
    )
    return frozenset(("process_crash",)), [line]


def _without_log(server: Standing) -> str:
    if server.snapshots:
        return (
            "process crash: snapshots only (save), and what was recorded after the last one is "
            "gone when the server dies; set appendonly yes"
        )
    return "process crash: nothing is written to disk; set appendonly yes"


def _about_failover(servers: Sequence[Standing], can_fail_over: bool) -> str:
    if any(server.is_replica for server in servers):
        return f"this server is a replica; {ASYNCHRONOUS}"
    if can_fail_over or any(server.replicas for server in servers):
        return ASYNCHRONOUS
    return "failover: there is no replica; the records are where this server is"
