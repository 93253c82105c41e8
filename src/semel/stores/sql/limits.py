"""What fits into one statement.

MariaDB and MySQL hang up on whoever sends a packet larger than `max_allowed_packet`, which looks
like an outage and would be tried again until the lease is over. So nothing that large is sent: a
batch is cut into pieces, a result that fits into no statement is recorded as lost, for it has
happened, and a step that fits into none is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from semel.errors import StoreUnavailableError
from semel.stores.rules import Claiming, Completing, Noting, Operation, key_of
from semel.stores.sql.links import Link
from semel.values import Outcome

log = logging.getLogger("semel")

Op = TypeVar("Op")

# Of one batch: one caller's large result must not hold up the others for long.
BATCH_BYTES = 4 * 1024 * 1024

# What goes with the values of one operation: its share of the statement, its id, attempt, times.
AROUND_BYTES = 1024

# Bytes that a MySQL driver writes as two.
ESCAPED = (b"\0", b"\n", b"\r", b"\x1a", b'"', b"'", b"\\")


async def packet(link: Link) -> int | None:
    """The most that one statement may have, read once per engine; None where there is no limit."""
    dialect = link.dialect
    if dialect.name == "mysql" and dialect.packet is None:
        ((dialect.packet,),) = await link.fetch("SELECT @@max_allowed_packet")
    return dialect.packet


def weight(op: Operation) -> int:
    """About how many bytes of a statement this is."""
    if isinstance(op, Completing):
        return AROUND_BYTES + len(op.outcome.data)
    if isinstance(op, Noting):
        return AROUND_BYTES + len(op.data) * 4 // 3
    return AROUND_BYTES + (4 * len(op.key.text) if isinstance(op, Claiming) else 0)


def chunks(
    ops: Sequence[Op], most: int | None, weigh: Callable[[Any], int] = weight
) -> list[list[Op]]:
    """The operations in pieces that fit into one statement."""
    room = BATCH_BYTES if most is None else min(BATCH_BYTES, most // 2)  # escaping may double it
    pieces: list[list[Op]] = [[]]
    size = 0
    for op in ops:
        size += weigh(op)
        if size > room and pieces[-1]:
            pieces.append([])
            size = weigh(op)
        pieces[-1].append(op)
    return pieces


def too_large(data: bytes, most: int | None) -> bool:
    if most is None or 2 * len(data) + AROUND_BYTES <= most:
        return False
    return len(data) + sum(map(data.count, ESCAPED)) + AROUND_BYTES > most


def fitting(op: Completing, most: int | None) -> Completing:
    """The same, or, when its outcome fits into no statement, that it was lost."""
    data = op.outcome.data
    if op.outcome.kind == "lost" or not too_large(data, most):
        return op
    return lost(
        op,
        f"its result of {len(data):,} bytes does not fit into max_allowed_packet ({most:,} bytes) "
        "of the database",
    )


def lost(op: Completing, why: str) -> Completing:
    """Return the completion with a lost result, and the reason why it is lost."""
    log.warning(
        "semel: the result of %r cannot be stored, so a repeat of this call will raise "
        "ResultLostError: %s",
        op.claim.key.text,
        why,
    )
    return Completing(op.claim, Outcome("lost", why.encode(), op.outcome.status))


def refusal(op: Operation, most: int | None) -> StoreUnavailableError | None:
    """Why this cannot be carried out, however often it is tried."""
    if not isinstance(op, Noting) or most is None or weight(op) <= most:
        return None
    return StoreUnavailableError(
        f"the step {op.name!r} of key {key_of(op).text!r} has {len(op.data):,} bytes, which does "
        f"not fit into max_allowed_packet ({most:,} bytes) of the database; record less, or raise "
        "that setting",
        again=False,
    )
