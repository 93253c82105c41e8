"""Who owns the shards of a name, by the claims they are owned with.

Below `semel.shards`, so that a store can ask whether anybody is at work in it.
"""

from __future__ import annotations

from collections.abc import Mapping

from semel.colour import ASYNC, answers_of
from semel.keys import make_key
from semel.ports import Store
from semel.values import Key, Record, State

__all__ = ["is_live", "key_of", "owners"]


async def owners(store: Store, name: str, count: int) -> Mapping[int, str]:
    """Who owns the shards of a name just now, by host and process; without those nobody owns."""
    ledger = store.ledger(ASYNC)
    asked = [ledger.look(key_of(name, f"shard {n}").id) for n in range(count)]
    seen = await answers_of(asked)
    return {n: record.holder for n, record in enumerate(seen) if record and is_live(record)}


def key_of(name: str, what: str) -> Key:
    return make_key(f"{name} {what}", operation="semel.shards", per_operation=True)


def is_live(record: Record) -> bool:
    return record.state is State.PENDING and record.lease_until > record.seen_at
