"""Checks of what consumers have had, and of what waits for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from semel.doctor.patient import Finding, Patient, span

if TYPE_CHECKING:
    from semel.stores.sql.doctor import Numbers, Waiting


async def gaps(patient: Patient) -> Sequence[Finding]:
    """Does a consumer wait for an event that has not come, or has the outbox lost one?"""
    from semel.stores.sql.doctor import SAMPLE

    found = [
        *(_missing(each) for each in await patient.numbers() if each.missing),
        *(_waits(patient, each) for each in await patient.waiting() if each.why == "gap"),
    ]
    return found or [Finding("ok", f"none, nor among the newest {SAMPLE:,} events")]


def _missing(numbers: Numbers) -> Finding:
    last = max(numbers.last, numbers.counter or 0)
    return Finding(
        "failed",
        f"{numbers.name}: {numbers.missing} of its numbers {numbers.first} to {last} are not in "
        "the outbox",
        "somebody deleted events by hand: bring them back, or its consumers park what follows",
    )


def _waits(patient: Patient, waiting: Waiting) -> Finding:
    return Finding(
        "failed" if waiting.oldest_s > patient.thresholds.gap_s else "warning",
        f"{waiting.consumer}: {waiting.count} wait for one that has not come, the first for "
        f"{span(waiting.oldest_s)}",
        f"see `semel parked list URL --consumer {waiting.consumer}`; without the missing ones: "
        "`semel parked skip`",
    )


async def parked(patient: Patient) -> Sequence[Finding]:
    """What waits for people?"""
    found = [each for each in await patient.waiting() if each.state == "parked"]
    consumers = sorted({each.consumer for each in found})
    return [
        _parked(patient, consumer, [each for each in found if each.consumer == consumer])
        for consumer in consumers
    ] or [Finding("ok", f"nothing of {', '.join(patient.consumers) or 'anybody'}")]


def _parked(patient: Patient, consumer: str, found: Sequence[Waiting]) -> Finding:
    count, oldest_s = _total(found)
    return Finding(
        "failed" if oldest_s > patient.thresholds.parked_s else "warning",
        f"{consumer}: {_counted(count)}, the oldest for {span(oldest_s)}",
        f"see `semel parked list URL --consumer {consumer} --state parked`, then edit, replay or "
        "skip",
    )


def _counted(count: int) -> str:
    from semel.stores.sql.doctor import SAMPLE

    return f"{count:,} or more" if count >= SAMPLE else f"{count:,}"


def _total(found: Iterable[Waiting]) -> tuple[int, float]:
    each = list(found)
    return sum(one.count for one in each), max(one.oldest_s for one in each)


async def retention(patient: Patient) -> Sequence[Finding]:
    """Is what may come again younger than what the inbox remembers?"""
    from semel.stores.sql.doctor import oldest

    remembered_s = patient.thresholds.retention_s
    first = await patient.ask(oldest)
    remembered = f"ids are remembered for {span(remembered_s)}"
    found: list[Finding] = []
    for each in await patient.waiting():
        if each.alone and each.oldest_s > remembered_s:
            figure = f"{each.consumer}: an event without a number waits for {span(each.oldest_s)}"
            advice = "nothing tells any more whether it had its effect: look, then replay --force"
            found.append(Finding("warning", f"{figure}, {remembered}", advice))
    if first is not None and first.age_s > remembered_s:
        figure = f"the outbox goes back {span(first.age_s)}, {remembered}"
        advice = "sweep the outbox, or give inboxes a longer retention_s than it goes back"
        found.append(Finding("warning", figure, advice))
    back = "is empty" if first is None else f"goes back {span(first.age_s)}"
    told = f"{remembered}; the outbox {back}: a broker that loses more than that is not healed"
    return found or [Finding("ok", told)]
