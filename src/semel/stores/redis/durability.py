"""What a Redis promises to remember, from what it says about itself.

The strict reading: `process_crash` means that the server may be killed too; a claim it
acknowledged must still be there when it is back. A snapshot taken now and then does not do that,
so RDB alone promises nothing. What Redis has handed to the kernel outlives it, but with
`appendfsync everysec` it acknowledges before that whenever the last fsync is still running.
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
    maxmemory: int | None
    policy: str
    replicas: int | None
    is_replica: bool = False


ALWAYS = "appendonly with appendfsync always: on disk before it is acknowledged"
LATER = (
    "power loss: appendfsync no acknowledges what the system writes to disk when it likes; set "
    "appendfsync always"
)
EVERY_SECOND = (
    "process crash: appendfsync everysec acknowledges up to two seconds before it writes, whenever "
    "the disk is slow; power loss: a second or two before it is on disk in any case; set "
    "appendfsync always"
)
UNSEEN = (
    "process crash, power loss: the server refuses CONFIG GET, so its settings cannot be checked; "
    "permit it: ACL SETUSER <user> +config|get"
)
EVICTION_UNSEEN = (
    "eviction: the server refuses INFO, so whether it evicts records cannot be checked; permit it: "
    "ACL SETUSER <user> +info"
)
REPLICAS_UNSEEN = "failover: the server refuses INFO, so whether it has replicas cannot be checked"

# By appendfsync. The log is written before the reply goes out, except that everysec puts the write
# off while an fsync runs: flushAppendOnlyFile in https://github.com/redis/redis/blob/7.0/src/aof.c
_KEPT_BY_LOG: dict[str, tuple[frozenset[Survives], str]] = {
    "always": (frozenset(("process_crash", "power_loss")), ALWAYS),
    "no": (frozenset(("process_crash",)), LATER),
    "everysec": (frozenset(), EVERY_SECOND),
}


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
    kept, line = _kept_on_disk(server)
    if server.maxmemory is None:
        return frozenset(), [EVICTION_UNSEEN, line]
    if not server.maxmemory or server.policy == "noeviction":
        return kept, [line]
    eviction = (
        f"eviction: maxmemory-policy {server.policy} forgets records when memory is short, "
        "which voids every promise; set maxmemory-policy noeviction"
    )
    return frozenset(), [eviction, line]


def _kept_on_disk(server: Standing) -> tuple[frozenset[Survives], str]:
    if server.appendonly is None:
        return frozenset(), UNSEEN
    if not server.appendonly:
        return frozenset(), _without_log(server)
    return _KEPT_BY_LOG.get(server.appendfsync, _KEPT_BY_LOG["everysec"])


def _without_log(server: Standing) -> str:
    if server.snapshots:
        return (
            "process crash, power loss: snapshots only (save), and what was recorded after the "
            "last one is gone when the server dies; set appendonly yes and appendfsync always"
        )
    return (
        "process crash, power loss: nothing is written to disk; set appendonly yes and "
        "appendfsync always"
    )


def _about_failover(servers: Sequence[Standing], can_fail_over: bool) -> str:
    if any(server.is_replica for server in servers):
        return f"this server is a replica; {ASYNCHRONOUS}"
    if can_fail_over or any(server.replicas for server in servers):
        return ASYNCHRONOUS
    if any(server.replicas is None for server in servers):
        return REPLICAS_UNSEEN
    return "failover: there is no replica; the records are where this server is"
