"""What is wrong with an outbox, its relays, its broker and its inboxes, and what to do about it.

    checks = await examine("postgresql://app@db/shop", broker, consumers=["billing"])
    for check in checks:
        print(check.row, check.verdict, check.figure, check.advice)

Each check is one row, and a small function in `ROWS`. All only look, with questions that stay
small however large the tables are, except the last one: it writes an event for every shard, the
canary, and waits until it comes back from the broker.

The easy mistake is to take "not checked" for well: without a broker half of the rows say that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from semel.doctor import broker as at_broker
from semel.doctor import canary as canaries
from semel.doctor import inbox, outbox
from semel.doctor import workers as groups
from semel.doctor.patient import Finding, Patient, Thresholds, Verdict
from semel.errors import BrokerUnavailableError, SemelError, SettingsError, StoreUnavailableError
from semel.ports import Broker
from semel.values import value

if TYPE_CHECKING:
    from semel.stores.sql import SQLStore

__all__ = ["ROWS", "Check", "Row", "Thresholds", "Verdict", "examine"]

# No question of ours takes a second on a healthy server.
PATIENCE_S = 40.0

# So many findings are told of one row.
TOLD = 5


@value
class Check:
    """One row: what was looked at, how it is, a figure, and what to do, if anything."""

    row: str
    verdict: Verdict
    figure: str
    advice: str = ""


@value
class Row:
    """A check: its name and what it does. `broker`: it needs one."""

    name: str
    work: Callable[[Patient], Awaitable[Sequence[Finding]]]
    broker: bool = False


CANARY = Row("canary", canaries.canary, broker=True)

ROWS = (
    Row("schema", outbox.schema),
    Row("shards", outbox.shards),
    Row("lag", outbox.lag),
    Row("held up", outbox.held_up),
    Row("long transactions", outbox.long_transactions),
    Row("gaps", inbox.gaps),
    Row("duplicates", outbox.duplicates),
    Row("parked", inbox.parked),
    Row("retention", inbox.retention),
    Row("bloat", outbox.bloat),
    Row("pending", at_broker.pending, broker=True),
    Row("workers", groups.workers, broker=True),
    Row("fullness", at_broker.fullness, broker=True),
    Row("durability", at_broker.durability, broker=True),
    Row("tails", at_broker.tails, broker=True),
    # Last, so that no other sees what it writes.
    CANARY,
)


async def examine(
    store: SQLStore | Any,
    broker: Broker | None = None,
    *,
    consumers: Sequence[str] = (),
    name: str = "default",
    canary: bool = True,
    wait_s: float = 10.0,
    thresholds: Thresholds | None = None,
) -> Sequence[Check]:
    """Look at everything, row by row. Whoever does not answer is told of, too.

    `store` is a database URL, an engine or an `SQLStore`. `broker` is that of the relays called
    `name`. `consumers` are the groups whose work is looked at; without any, all that are found.
    `wait_s` is how long the canary may take.
    """
    from semel.stores.sql import SQLStore

    opened = None if isinstance(store, SQLStore) else SQLStore(store)
    patient = Patient(
        opened or store,
        broker,
        consumers,
        name,
        wait_s,
        thresholds or Thresholds(),
    )
    try:
        visit = Visit(patient)
        rows = [row for row in ROWS if canary or row is not CANARY]
        checks = [await visit.check(row) for row in rows]
    finally:
        if opened is not None:
            await opened.aclose()
    if not canary:
        checks.append(Check(CANARY.name, "not checked", "not asked for"))
    return checks


class Visit:
    """One examination: whoever has not answered once is not asked again."""

    def __init__(self, patient: Patient) -> None:
        self._patient = patient
        self._silent: set[str] = set()

    async def check(self, row: Row) -> Check:
        why = await self._why_not(row)
        return _summed(row, [why] if why else await self._findings(row))

    async def _why_not(self, row: Row) -> Finding | None:
        if "database" in self._silent:
            return Finding("not checked", "the database did not answer")
        if not row.broker:
            return None
        if not self._patient.has_broker:
            return Finding("not checked", "no broker was given", "give its URL with --broker")
        if "broker" in self._silent and row is not CANARY:
            return Finding("not checked", "the broker did not answer")
        return None

    async def _findings(self, row: Row) -> Sequence[Finding]:
        from semel.stores.sql import NoTableError

        patience_s = PATIENCE_S + (self._patient.wait_s if row is CANARY else 0.0)
        try:
            async with asyncio.timeout(patience_s):
                if row.broker and not await self._agree():
                    return [Finding("not checked", "another number of shards", "see `shards`")]
                return await row.work(self._patient)
        except NoTableError:
            return [Finding("not checked", "a table is missing", "see `schema`")]
        except SettingsError as error:
            return [Finding("not checked", str(error))]
        except BrokerUnavailableError as error:
            self._silent.add("broker")
            return [_unanswered(error, "see that the broker is up, and its URL")]
        except StoreUnavailableError as error:
            await self._knock()
            return [_unanswered(error, "see that the database is up, and its URL")]
        except TimeoutError:
            return [Finding("failed", f"no answer within {patience_s:.0f} s")]

    async def _agree(self) -> bool:
        """On the number of shards: otherwise we would look at streams that nobody writes to."""
        return await self._patient.shards() in (None, self._patient.broker.shards)

    async def _knock(self) -> None:
        """One table that we may not read is not a database that is down."""
        try:
            await self._patient.ask(lambda link: link.fetch("SELECT 1"))
        except (StoreUnavailableError, SettingsError):
            self._silent.add("database")


def _unanswered(error: SemelError, advice: str) -> Finding:
    """Return a failed finding; if a Redis ACL refused a command, the advice is the rule to add."""
    _, acl, rule = str(error).partition("ACL SETUSER ")
    if acl:
        advice = f"{acl}{rule}; all rules are in `Redis ACL` (reference/stores)"
    return Finding("failed", str(error), advice)


RANK: Sequence[Verdict] = ("failed", "warning", "ok", "not checked")


def _summed(row: Row, findings: Sequence[Finding]) -> Check:
    """The worst of it, and what is to be done about that."""
    told = sorted(findings, key=lambda each: RANK.index(each.verdict))
    figures = [each.figure for each in told[:TOLD]]
    if len(told) > TOLD:
        figures.append(f"and {len(told) - TOLD} more")
    advice = dict.fromkeys(each.advice for each in told[:TOLD] if each.advice)
    return Check(row.name, told[0].verdict, "; ".join(figures), "; ".join(advice))
