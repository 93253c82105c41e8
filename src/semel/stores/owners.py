"""Who owns the shards of a name, by the claims they are owned with.

Below `semel.shards`, so that a store can ask whether anybody is at work in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from semel.colour import ASYNC
from semel.keys import make_key
from semel.ports import Store
from semel.values import Key, Record, State

__all__ = ["is_live", "key_of", "owners"]


async def owners(store: Store, name: str, count: int) -> Mapping[int, str]:
    """Who owns the shards of a name just now, by host and process; without those nobody owns."""
    ledger = store.ledger(ASYNC)
    asked = [ledger.look(key_of(name, f"shard {n}").id) for n in range(count)]
    found: dict[int, str] = {}
    # Every answer, or the first error once all are through: none goes on unseen.
    for n, record in enumerate(await asyncio.gather(*asked, return_exceptions=True)):
        if isinstance(record, BaseException):
            raise record
        if record is not None and is_live(record):
            found[n] = record.holder
    return found


def key_of(name: str, what: str) -> Key:
    return make_key(f"{name} {what}", operation="semel.shards", per_operation=True)


def is_live(record: Record) -> bool:
    return record.state is State.PENDING and record.lease_until > record.seen_at
