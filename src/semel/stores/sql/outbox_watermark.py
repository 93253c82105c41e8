"""How far a reader of the outbox may go: to the last id below which nothing can appear any more.

Ids are taken when rows are written and become visible when they are committed, in any order. A
reader that goes on from the largest id it saw passes over whatever was taken earlier and
committed later, and never comes back for it.

On PostgreSQL each writing transaction takes a shared advisory lock whose key is the last id that
anybody had taken before, and only then ids of its own. So every id that is not decided lies above
a key that is held, or above what the sequence said before the locks were looked at. Only writers
of the outbox count: a long transaction of somebody else holds up nobody.

What is easy to get wrong, each with its test in `tests/contract/test_outbox.py`:

- the lock is taken in a statement before the one that takes ids, or ids may come first;
- a sequence nobody has used says 1 and means 0;
- a lock taken in a savepoint ends with it, so it is taken at COMMIT, behind all of them;
- the reader looks at the sequence, then at the locks, then at the rows, in three statements, each
  with a snapshot of its own (READ COMMITTED): in one statement it passes rows over;
- a standby knows nothing of the writers' locks;
- a sequence with a CACHE gives a connection ids in bundles, which lie below others' by then.

On SQLite there is one writer at a time, and ids are committed in their order. MariaDB and MySQL
have no lock that ends with the transaction; there, rows that can be seen get a position of their
own (`outbox_placing`).
"""

from __future__ import annotations

from semel.errors import SettingsError
from semel.stores.sql.links import Link
from semel.stores.sql.schema import ID_SEQUENCE

# The upper 16 bits of a key say whose it is, so that an advisory lock of the application's own,
# or an outbox in another schema, is not taken for a writer. 1 to 32767: the key stays positive,
# and apart from the small numbers that people lock.
_PLACE = "(mod(s.tableoid::int8, 32767) + 1)"
PLACE = f"(SELECT {_PLACE} FROM {ID_SEQUENCE} AS s)"  # noqa: S608

_LAST = "(s.last_value - (NOT s.is_called)::int)"

KEY = f"(({_PLACE} << 48) | {_LAST})"

LOCKED = f"pg_advisory_xact_lock_shared({KEY})::text"
"""For a writer, over the sequence as `s`: held from here to the end of the transaction."""

_ASKED = f"""
SELECT {_LAST}, {_PLACE}, pg_is_in_recovery(), q.seqcache, now()::text
FROM {ID_SEQUENCE} AS s JOIN pg_sequence AS q ON q.seqrelid = s.tableoid"""  # noqa: S608

HELD = """
FROM pg_locks AS l
WHERE l.locktype = 'advisory' AND l.objsubid = 1
    AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
    AND (l.classid::int8 >> 16) = """
"""The locks of writers, with `PLACE` behind it."""

# Within one transaction now() stands still.
_HELD = f"""
SELECT min(((l.classid::int8 & 65535) << 32) | l.objid::int8), now()::text,
    current_setting('transaction_isolation') {HELD} ?::int8"""

_GIVEN_OUT = "SELECT COALESCE(max(seq), 0) FROM sqlite_sequence WHERE name = 'event_outbox'"


async def decided(link: Link) -> int | None:
    """The highest id that a reader may pass: every id up to it is visible, or never will be.

    Read the rows in a later statement than this one. None where ids say nothing about what is
    still to come (MariaDB and MySQL).
    """
    match link.dialect.name:
        case "postgresql":
            return await _below_the_writers(link)
        case "sqlite":
            [(given_out,)] = await link.fetch(_GIVEN_OUT)
            return int(given_out)
        case _:
            return None


async def _below_the_writers(link: Link) -> int:
    [(last, place, standby, cache, began)] = await link.fetch(_ASKED)
    _refuse_ids(standby=standby, cache=cache)
    [(held, still, level)] = await link.fetch(_HELD, [place])
    if still == began and level != "read committed":
        raise SettingsError(
            f"this transaction is {level.upper()}, so it cannot see what was committed since it "
            "began; read the outbox with READ COMMITTED, or in autocommit mode"
        )
    return int(last) if held is None else min(int(last), int(held))


def _refuse_ids(*, standby: bool, cache: int) -> None:
    if standby:
        raise SettingsError(
            "this server is a standby, where the locks of those who write cannot be seen; read "
            "the outbox on the primary"
        )
    if cache != 1:
        raise SettingsError(
            f"{ID_SEQUENCE} gives out ids in bundles of {cache}, so that they say nothing about "
            f"what is still to come; ALTER SEQUENCE {ID_SEQUENCE} CACHE 1, and connect anew"
        )
