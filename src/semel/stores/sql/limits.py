"""What fits into one statement.

MariaDB and MySQL close the connection after a packet larger than `max_allowed_packet`. That can
look like an outage, which would be retried until the lease is over. So nothing that large is sent.
A batch is cut into pieces. A result that fits into no statement is recorded as lost, because the
call has happened. A step is refused if it and the steps before it do not fit into one statement.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from semel.errors import StoreUnavailableError
from semel.stores.rules import Claiming, Completing, Noting, Operation
from semel.stores.sql.links import Link
from semel.values import Outcome

log = logging.getLogger("semel")

Op = TypeVar("Op")

# Of one batch: one caller's large result must not hold up the others for long.
BATCH_BYTES = 4 * 1024 * 1024

# What goes with the values of one operation: its share of the statement, its id, attempt, times.
AROUND_BYTES = 1024

# Only steps of at most SMALL_STEP_BYTES bytes may use the last part of a packet: one eighth, 2 MiB
# of MariaDB's 16 MiB. Without it, a lost step could not be recorded after steps that fill the
# packet. The note of a lost step has fewer than 128 bytes.
SMALL_STEP_BYTES = 128
RESERVED_SHARE = 8

# Characters of a text that a MySQL driver writes as two.
ESCAPED = (b"\0", b"\n", b"\r", b"\x1a", b'"', b"'", b"\\")


async def packet(link: Link) -> int | None:
    """Return the most bytes of one statement; None where there is no limit.

    It is read once per engine, and again after an error that a lower limit may have caused.
    """
    dialect = link.dialect
    most = dialect.packet
    if dialect.name == "mysql" and most is None:
        ((most,),) = await link.fetch("SELECT @@max_allowed_packet")
        dialect.packet = most
    return most


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
    """Return whether these bytes may not fit: PyMySQL sends two hex digits for each of them."""
    return most is not None and 2 * len(data) + AROUND_BYTES > most


def fitting(op: Completing, most: int | None) -> Completing:
    """The same, or, when its outcome fits into no statement, that it was lost."""
    data = op.outcome.data
    if op.outcome.kind == "lost" or not too_large(data, most):
        return op
    return lost(
        op,
        f"its result of {len(data):,} bytes, which can take two each in a statement, does not fit "
        f"into max_allowed_packet ({most:,} bytes) of the database",
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


def refusal(op: Noting, values: Sequence[Any], most: int) -> StoreUnavailableError | None:
    """Return why a step cannot be recorded, or None. `values`: those of its row, with all steps."""
    room = most if len(op.data) <= SMALL_STEP_BYTES else most - most // RESERVED_SHARE
    if _sent_bytes(values) <= room:
        return None
    return StoreUnavailableError(
        f"the step {op.name!r} of key {op.claim.key.text!r} has {len(op.data):,} bytes, which does "
        "not fit, together with the steps before it and room for later ones, into "
        f"max_allowed_packet ({most:,} bytes) of the database; record less, or raise that setting",
        again=False,
    )


def _sent_bytes(values: Sequence[Any]) -> int:
    """Return the most bytes that a statement with these values has."""
    return 2 * AROUND_BYTES + sum(map(_sent_as, values))


def _sent_as(value: Any) -> int:
    if isinstance(value, str):
        text = value.encode()
        return len(text) + sum(map(text.count, ESCAPED))
    return 2 * len(value) if isinstance(value, bytes) else 0
