"""Looking into the ledger, settling what it cannot settle by itself, and sweeping it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from semel.stores import rules
from semel.stores.sql import generic
from semel.stores.sql.links import Link
from semel.stores.sql.rows import (
    COLUMNS,
    TENANT_CHARS,
    original_text,
    row_of,
    shortened,
    stored_text,
)
from semel.values import Outcome, Record, State

# Rows per DELETE: few enough that no lock lasts long enough to be felt by a claim.
SWEEP_CHUNK = 500

# Rows that a listing reads at a time while it looks for the ones that are wanted.
PAGE = 200


async def look(link: Link, id: bytes) -> Record | None:
    now_us, row = await generic.read_one(link, id)
    if row is None or rules.expired(row, now_us):
        return None
    return rules.record(row, now_us)


# --- listing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records a listing includes."""

    tenant: str | None
    operation: str | None
    state: State | None

    def conditions(self, codec: str) -> list[tuple[str, str]]:
        """What the database can tell; the rules have the last word."""
        found = []
        if self.tenant is not None:
            found.append(("tenant_id = ?", shortened(self.tenant, TENANT_CHARS, codec)))
        if self.operation is not None:
            found.append(("operation = ?", stored_text(self.operation, codec)))
        if self.state in {State.COMPLETED, State.FAILED}:
            found.append(("state = ?", str(self.state)))
        elif self.state is not None:  # a held row whose lease ran out is seen as UNKNOWN
            found.append(("state <> ?", "COMPLETED"))
        return found

    def includes(self, record: Record, codec: str) -> bool:
        tenant = self.tenant
        if tenant is not None:
            tenant = original_text(shortened(tenant, TENANT_CHARS, codec))
        return rules.wanted(record, tenant, self.operation, self.state)


async def records(link: Link, wanted: Wanted, limit: int, after: bytes | None) -> Sequence[Record]:
    found: list[Record] = []
    while len(found) < limit:
        page = await _page(link, wanted, after, PAGE)
        found += [r for r, seen in page if seen and wanted.includes(r, link.dialect.codec)]
        if len(page) < PAGE:
            break
        after = page[-1][0].key.id
    return found[:limit]


async def _page(
    link: Link, wanted: Wanted, after: bytes | None, size: int
) -> list[tuple[Record, bool]]:
    """The next records by id, each with whether it has not expired."""
    where: list[tuple[str, Any]] = [("id > ?", after)] if after is not None else []
    where += wanted.conditions(link.dialect.codec)
    columns = ", ".join(link.dialect.response if c == "response" else c for c in COLUMNS)
    lines = await link.fetch(
        f"SELECT {{now}}, {columns} FROM idempotency "  # noqa: S608
        + (f"WHERE {' AND '.join(text for text, _ in where)} " if where else "")
        + f"ORDER BY id LIMIT {size}",
        (*link.dialect.now_param(), *(value for _, value in where)),
    )
    return [_seen(link, line) for line in lines]


def _seen(link: Link, line: Sequence[Any]) -> tuple[Record, bool]:
    now_us, row = link.dialect.micros(line[0]), row_of(line[1:], link.dialect)
    return rules.record(row, now_us), not rules.expired(row, now_us)


# --- settling -----------------------------------------------------------------------------------


async def resolve(
    link: Link, id: bytes, fence: int, outcome: Outcome | None, ttl_s: float | None
) -> bool:
    while True:
        now_us, before = await generic.read_one(link, id)
        after = rules.resolve(before, fence, outcome, ttl_s, now_us)
        if before is None or after is None:
            return False
        if await generic.update(link, before, after):
            return True


async def forget(link: Link, id: bytes, force: bool) -> bool:
    while True:
        now_us, row = await generic.read_one(link, id)
        if row is None or not rules.forgettable(row, force, now_us):
            return False
        if await generic.delete(link, row):
            return True


# --- sweeping -----------------------------------------------------------------------------------

EXPIRED = "SELECT id FROM idempotency WHERE expires_at <= {now} ORDER BY expires_at LIMIT ?"

# The clock in a subquery is read once and can be looked up in the index; by itself it is compared
# with every row there is. Rows that are locked keep their place, so that is what they go by.
POSTGRES_SWEEP = """
DELETE FROM idempotency WHERE ctid = ANY (ARRAY (
    SELECT ctid FROM idempotency WHERE expires_at <= (SELECT {now})
    ORDER BY expires_at LIMIT ? FOR UPDATE SKIP LOCKED
))
"""


async def sweep(link: Link, size: int) -> tuple[int, int]:
    """Delete so many of what expired: how many were found, and how many deleted."""
    work = _sweep_postgres if link.dialect.name == "postgresql" else _sweep_by_id
    return await work(link, size)


async def _sweep_postgres(link: Link, size: int) -> tuple[int, int]:
    deleted = await link.change(POSTGRES_SWEEP, (size,))
    return deleted, deleted


async def _sweep_by_id(link: Link, size: int) -> tuple[int, int]:
    """Found without a lock, deleted by primary key if still expired and nobody has it locked."""
    now = link.dialect.now_param()
    ids = [bytes(id) for (id,) in await link.fetch(EXPIRED, (*now, size))]
    if not ids:
        return 0, 0
    async with generic.transaction(link):
        free = sorted(await generic.lock(link, ids))
        return len(ids), await _delete_expired(link, free) if free else 0


async def _delete_expired(link: Link, ids: Sequence[bytes]) -> int:
    marks = ", ".join("?" * len(ids))
    statement = f"DELETE FROM idempotency WHERE id IN ({marks}) AND expires_at <= {{now}}"  # noqa: S608
    return await link.change(statement, (*ids, *link.dialect.now_param()))
