"""Checks of the outbox and its relays, by what the database knows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from semel.colour import ASYNC
from semel.doctor.patient import Finding, Patient, span
from semel.ports import Store
from semel.shards import owners

# A shard that is handed over is nobody's for a moment; whoever gets it looks every few seconds.
HANDED_OVER_WITHIN_S = 5.0
LOOK_S = 0.5

# What is published goes after `keep_s`, a chunk at a time, if somebody sweeps.
LATE = 2.0
LATE_S = 600.0

QUERY_CHARS = 80


async def schema(patient: Patient) -> Sequence[Finding]:
    """Are the tables as this release needs them?"""
    from semel.stores.sql import check

    report = await asyncio.to_thread(check, patient.store.engine_or_url)
    advice = "run `semel db init URL` or `semel db upgrade URL`; `semel db check URL` tells more"
    if report.problems:
        return [Finding("failed", problem, advice) for problem in report.problems]
    return [Finding("ok", "the tables are as they should be")]


async def shards(patient: Patient) -> Sequence[Finding]:
    """Does every shard have an owner, and do all agree on how many there are?"""
    count = await patient.shards()
    if count is None:
        advice = f"start `semel relay URL --to URL --name {patient.name}`, or check the name"
        figure = f"no relay called {patient.name!r} has ever read this outbox"
        return [Finding("failed", figure, advice)]
    if patient.has_broker and patient.broker.shards != count:
        figure = f"the relays have {count} shards, and the broker was opened with "
        advice = f"give the broker's URL with ?shards={count}, or run `semel outbox reshard`"
        return [Finding("failed", f"{figure}{patient.broker.shards}", advice)]
    found = await owned(patient.store, f"relay:{patient.name}", count)
    nobodys = [str(shard) for shard in range(count) if shard not in found]
    if nobodys:
        advice = f"start `semel relay URL --to URL --name {patient.name}`, and see its log"
        figure = f"no relay owns shard {', '.join(nobodys)}"
        return [Finding("failed", figure, advice)]
    relays = sorted(set(found.values()))
    return [Finding("ok", f"{count}, owned by {', '.join(relays)}")]


async def owned(store: Store, name: str, count: int) -> Mapping[int, str]:
    """Who owns which shard.

    Looked at again while one is being handed over; not where nobody is there at all.
    """
    until = ASYNC.now() + HANDED_OVER_WITHIN_S
    while True:
        found = await owners(store, name, count)
        if len(found) in (0, count) or ASYNC.now() > until:
            return found
        await ASYNC.sleep(LOOK_S)


async def lag(patient: Patient) -> Sequence[Finding]:
    """How old is the oldest event that is not published?"""
    found, limits = await patient.lag(), patient.thresholds
    reached = max(found.positions.values(), default=0)
    if reached > (given_out := await patient.news()):
        figure = f"published up to position {reached}, and ids are at {given_out}: they began anew"
        advice = (
            "set the counter behind the ids to where the relays are, and give the rows that are "
            "not published new ids; see the relay's log"
        )
        return [Finding("failed", figure, advice)]
    figure = f"{span(found.age_s)}, {found.unpublished:,} unpublished"
    if found.behind:
        figure += f"; behind the others: {', '.join(found.behind)}"
    if found.age_s <= limits.lag_warning_s:
        return [Finding("ok", figure)]
    advice = "see `shards` and `held up`, and what the relay's log and /readyz say"
    return [Finding("failed" if found.age_s > limits.lag_s else "warning", figure, advice)]


async def held_up(patient: Patient) -> Sequence[Finding]:
    """Does a writer sit between adding its events and the end of its transaction?"""
    from semel.stores.sql.doctor import writers

    if patient.store.url.drivername != "postgresql":
        return [Finding("ok", "on this database no writer can hold up relays")]
    found = await patient.ask(writers)
    return [
        Finding(
            "failed",
            f"pid {each.pid} for {span(each.open_s)} ({each.state}): {each.query[:QUERY_CHARS]}",
            f"end it: SELECT pg_terminate_backend({each.pid})",
        )
        for each in found
        if each.open_s > patient.thresholds.held_up_s
    ] or [Finding("ok", "by nobody")]


async def long_transactions(patient: Patient) -> Sequence[Finding]:
    """They hold up no relay, but nothing that was deleted since they began goes away for good."""
    database = patient.store.url.drivername
    if database == "sqlite":
        return [Finding("not checked", "SQLite does not tell")]
    ends = "SELECT pg_terminate_backend({})" if database == "postgresql" else "KILL {}"
    found = await patient.reader(1).long_transactions(patient.thresholds.open_s)
    return [
        Finding(
            "warning",
            f"pid {each.pid} for {span(each.open_s)} ({each.state}): {each.query[:QUERY_CHARS]}",
            f"commit or end it: {ends.format(each.pid)}",
        )
        for each in found
    ] or [Finding("ok", f"none older than {span(patient.thresholds.open_s)}")]


async def duplicates(patient: Patient) -> Sequence[Finding]:
    """Is a number of an aggregate there twice, or will one be?"""
    from semel.stores.sql.doctor import SAMPLE

    found: list[Finding] = []
    for each in await patient.numbers():
        if each.doubled:
            figure = f"{each.name}: {each.doubled} of its numbers are there twice"
            advice = "somebody wrote to event_outbox by hand: consumers see the first one only"
            found.append(Finding("failed", figure, advice))
        if each.is_behind:
            figure = f"{each.name}: counter at {each.counter or 0}, and {each.last} is taken"
            advice = "set event_outbox_seq.seq to the largest seq of the aggregate's events"
            found.append(Finding("failed", figure, advice))
    return found or [Finding("ok", f"none among the newest {SAMPLE:,} events")]


async def bloat(patient: Patient) -> Sequence[Finding]:
    """Do tables keep what nobody needs?"""
    found = [*await _dead_rows(patient), *await _unswept(patient), *await _remembered(patient)]
    if any(each.verdict != "ok" for each in found):
        return [each for each in found if each.verdict != "ok"]
    return found or [Finding("ok", "nothing is older than it should be")]


async def _dead_rows(patient: Patient) -> Sequence[Finding]:
    from semel.stores.sql.doctor import sizes

    found: list[Finding] = []
    for size in await patient.ask(sizes):
        figure = f"{size.table} {size.bytes / 1e6:.1f} MB"
        live, dead = size.live or 0, size.dead or 0
        if dead > max(live, patient.thresholds.dead_rows):
            ago = "never" if size.vacuumed_s is None else f"{span(size.vacuumed_s)} ago"
            figure += f", {dead:,} dead rows beside {live:,} live ones, vacuumed {ago}"
            advice = f"see `long transactions`, and that autovacuum is on; VACUUM {size.table}"
            found.append(Finding("warning", figure, advice))
        else:
            found.append(Finding("ok", figure))
    return found


async def _unswept(patient: Patient) -> Sequence[Finding]:
    """Published rows that should be gone, or what keeps them."""
    from semel.stores.sql.doctor import lowest, oldest
    from semel.stores.sql.outbox_sweep import floor

    keep_s = patient.thresholds.keep_s
    first = await patient.ask(oldest)
    if keep_s is None or first is None or first.age_s <= LATE * keep_s + LATE_S:
        return []
    age = f"the oldest event is {span(first.age_s)} old"
    if 0 < first.position <= await patient.ask(floor):
        advice = "run `semel outbox sweep URL`; a relay does it unless it says --keep forever"
        return [Finding("warning", f"{age}, published, and not swept", advice)]
    others = [
        name
        for name, at in (await patient.ask(lowest)).items()
        if at < (first.position or at + 1) and name != patient.name
    ]
    return [
        Finding(
            "warning",
            f"{age}, and kept for the relays {name!r}",
            "start them; if they are gone for good, delete their rows of event_outbox_cursor",
        )
        for name in others
    ]


async def _remembered(patient: Patient) -> Sequence[Finding]:
    from semel.stores.sql.doctor import oldest_remembered_s

    age_s = await patient.ask(oldest_remembered_s)
    if age_s is None or age_s <= patient.thresholds.retention_s + LATE * LATE_S:
        return []
    figure = f"inbox_message goes back {span(age_s)}, and is not swept"
    return [Finding("warning", figure, "start a worker: it sweeps the inbox, or `inbox.sweep()`")]
