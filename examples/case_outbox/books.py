"""What was committed, what each group has done about it, and whether the two agree."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from office import NEVER_MIND
from pieces import GROUPS, engine

UNREAD = """
    SELECT d.case_id FROM documents d LEFT JOIN worker_readings r ON r.document_id = d.id
    WHERE d.case_id LIKE :ours AND r.document_id IS NULL
"""
COMMITTED = "SELECT event_id FROM event_outbox WHERE aggregate_id LIKE :ours AND topic = :topic"
DONE = """
    SELECT case_id, seq, event_id FROM done
    WHERE case_id LIKE :ours AND group_name = :group_name ORDER BY id
"""

MISSING = """
    SELECT
        (
            SELECT coalesce(sum(CASE topic WHEN 'axiom:events' THEN 2 ELSE 1 END), 0)
            FROM event_outbox WHERE aggregate_id LIKE :ours
        ) - (SELECT count(*) FROM done WHERE case_id LIKE :ours)
"""

# Each finds what must not be there.
MISTAKES = {
    "a transaction that was rolled back has told of itself": """
        SELECT event_id FROM event_outbox WHERE aggregate_id LIKE :ours AND payload LIKE :never
    """,
    "a case has another number of events than its ontology has versions": """
        SELECT e.aggregate_id FROM event_outbox e JOIN synapse_ontologies o
            ON o.case_id = e.aggregate_id
        WHERE e.aggregate_id LIKE :ours AND e.topic = 'axiom:events'
        GROUP BY e.aggregate_id, o.version HAVING count(*) <> o.version
    """,
    "a case has another number of events than its analysis counts": """
        SELECT e.aggregate_id FROM event_outbox e JOIN vision_analyses a
            ON a.case_id = e.aggregate_id
        WHERE e.aggregate_id LIKE :ours AND e.topic = 'axiom:events'
        GROUP BY e.aggregate_id, a.events HAVING count(*) <> a.events
    """,
    "a reminder is not of the last deadline that was set": """
        SELECT c.id FROM cases c LEFT JOIN watch_reminders r ON r.case_id = c.id
        WHERE c.id LIKE :ours AND (r.deadline IS NULL OR r.deadline <> c.deadline)
    """,
    "a document is not read": UNREAD,
}


class Books:
    """Of the cases whose ids begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def committed(self, topic: str) -> list[str]:
        return [row[0] for row in self._rows(COMMITTED, topic=topic)]

    def done(self, group: str) -> list[Any]:
        return self._rows(DONE, group_name=group)

    def unread(self) -> set[str]:
        """Cases with a document that nobody has read yet."""
        return {row[0] for row in self._rows(UNREAD)}

    def missing(self) -> int:
        """Effects that are still to come: all in one statement, for it changes all the time."""
        return int(self._rows(MISSING)[0][0])

    def compare(self, group: str) -> tuple[int, int, list[str]]:
        """How many events the group was to hear of, how many effects it had, and what is wrong."""
        committed, done = self.committed(GROUPS[group]), self.done(group)
        return len(committed), len(done), list(wrong(committed, done))

    def mistakes(self) -> list[str]:
        return [told for told, select in MISTAKES.items() if self._rows(select)]

    def _rows(self, select: str, **which: str) -> list[Any]:
        text = sa.text(select)
        named = {"ours": f"{self._prefix}%", "never": f"%{NEVER_MIND}%", **which}
        with engine.connect() as connection:
            wanted = {name: named[name] for name in text.compile().params}
            return list(connection.execute(text, wanted))


def wrong(committed: list[str], done: list[Any]) -> Iterable[str]:
    """What is wrong with effects that were had in this order."""
    times = Counter(row.event_id for row in done)
    if lost := set(committed) - set(times):
        yield f"{len(lost)} had none"
    if strange := set(times) - set(committed):
        yield f"{len(strange)} were never committed"
    if twice := [id for id, count in times.items() if count > 1]:
        yield f"{len(twice)} had more than one"
    by_case = defaultdict(list)
    for row in done:
        by_case[row.case_id].append(row.seq)
    if mixed := [case for case, seqs in by_case.items() if seqs != sorted(seqs)]:
        yield f"{len(mixed)} cases out of order"
