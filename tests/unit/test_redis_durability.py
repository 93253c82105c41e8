"""What settings promise, as a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semel.stores.redis.durability import Standing, guarantees_of

ALWAYS = Standing(
    appendonly=True,
    appendfsync="always",
    snapshots=False,
    maxmemory=0,
    policy="noeviction",
    replicas=0,
)
CACHE = replace(ALWAYS, maxmemory=1 << 30, policy="allkeys-lru")


@pytest.mark.parametrize(
    ("standing", "survives", "why"),
    [
        (ALWAYS, {"process_crash", "power_loss"}, "on disk before"),
        (replace(ALWAYS, appendfsync="everysec"), set(), "two seconds before it writes"),
        (replace(ALWAYS, appendfsync="no"), {"process_crash"}, "when it likes; set appendfsync"),
        (replace(ALWAYS, appendfsync=""), set(), "set appendfsync always"),
        (replace(ALWAYS, appendonly=False, snapshots=True), set(), "snapshots only"),
        (replace(ALWAYS, appendonly=False), set(), "nothing is written to disk"),
        (replace(ALWAYS, appendonly=None), set(), "refuses CONFIG"),
        (CACHE, set(), "set maxmemory-policy noeviction"),
        (replace(CACHE, policy="volatile-ttl"), set(), "voids every promise"),
        (replace(CACHE, policy="noeviction"), {"process_crash", "power_loss"}, "no replica"),
        (replace(CACHE, maxmemory=0), {"process_crash", "power_loss"}, "no replica"),
        (replace(ALWAYS, replicas=1), {"process_crash", "power_loss"}, "asynchronous"),
        (replace(ALWAYS, is_replica=True), {"process_crash", "power_loss"}, "is a replica"),
    ],
)
def test_settings_promise_this_much(standing, survives, why):
    found = guarantees_of("redis", [standing], can_fail_over=False)
    assert found.survives == survives
    assert why in " ".join(found.why)
    assert found.shared


@pytest.mark.parametrize("appendonly", [True, False, None])
@pytest.mark.parametrize("appendfsync", ["always", "everysec", "no", ""])
@pytest.mark.parametrize("snapshots", [True, False])
@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_what_is_not_survived_has_a_reason(appendonly, appendfsync, snapshots, policy):
    standing = replace(
        CACHE,
        appendonly=appendonly,
        appendfsync=appendfsync,
        snapshots=snapshots,
        policy=policy,
    )
    found = guarantees_of("redis", [standing], can_fail_over=False)
    why = " ".join(found.why)
    for loss in {"process_crash", "power_loss", "failover"} - found.survives:
        assert "voids every promise" in why or loss.replace("_", " ") in why


def test_the_advice_is_enough():
    """A log alone is not: its own default promises nothing here."""
    for snapshots in (True, False):
        standing = replace(ALWAYS, appendonly=False, snapshots=snapshots)
        why = " ".join(guarantees_of("redis", [standing], can_fail_over=False).why)
        assert "set appendonly yes and appendfsync always" in why


def test_eviction_is_said_first():
    found = guarantees_of("redis", [ALWAYS, CACHE], can_fail_over=True)
    assert found.why[0].startswith("eviction")
    assert found.survives == set()


def test_a_cluster_promises_what_its_weakest_server_does():
    weaker = replace(ALWAYS, appendfsync="no")
    found = guarantees_of("redis", [ALWAYS, weaker, ALWAYS], can_fail_over=True)
    assert found.survives == {"process_crash"}
    assert len(found.why) == len(set(found.why))


@pytest.mark.parametrize("standing", [ALWAYS, CACHE, replace(ALWAYS, replicas=2)])
@pytest.mark.parametrize("can_fail_over", [True, False])
def test_no_redis_survives_a_failover(standing, can_fail_over):
    found = guarantees_of("redis", [standing], can_fail_over=can_fail_over)
    assert "failover" not in found.survives
