"""How what is parked looks: sequences, their messages, what was done about them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from semel.cli import show
from semel.cli.show import Json, iso
from semel.cli.table import Column
from semel.messages import Audit, ParkedMessage, ParkedSequence, Settled

# Enough to name a sequence by: a thousand of them share no prefix of this length.
SHORT = 12

# Where an error was raised, as the inbox writes it behind what it says.
PLACE = re.compile(r" \([^()]+:\d+\)$")


# --- for programs -------------------------------------------------------------------------------


def sequence_json(found: ParkedSequence) -> Json:
    message = found.head.message
    return {
        "sequence": found.sequence.hex(),
        "consumer": found.head.consumer,
        "tenant": message.tenant,
        "topic": message.topic,
        "aggregate_type": message.aggregate_type,
        "aggregate_id": message.aggregate_id,
        "mark": found.mark,
        "behind": found.behind,
        "head": message_json(found.head),
    }


def message_json(row: ParkedMessage) -> Json:
    return {
        "event_id": row.message.id,
        "type": row.message.type,
        "seq": row.message.seq,
        "time": iso(row.message.time),
        "state": row.state,
        "why": row.why,
        "attempts": row.attempts,
        "error": row.error,
        "parked_at": iso(row.parked_at),
        "due_at": iso(row.due_at),
        "edited": row.edited,
        "refused": row.message.refused,
        "headers": dict(row.message.headers),
        "payload": row.message.payload,
    }


def settled_json(word: str, settled: Settled) -> Json:
    return {
        word: not settled.dry_run,
        "event_id": settled.event_id,
        "told": settled.told,
        "why": "dry run" if settled.dry_run else None,
    }


def audit_json(one: Audit) -> Json:
    return {
        "at": iso(one.at),
        "who": one.who,
        "verb": one.verb,
        "consumer": one.consumer,
        "sequence": one.sequence.hex(),
        "event_id": one.event_id,
        "note": one.note,
        "before": one.before,
        "after": one.after,
    }


# --- for people ---------------------------------------------------------------------------------

SEQUENCE_COLUMNS = (
    Column("sequence", rank=0, least=SHORT),
    Column("consumer", rank=3, least=12),
    Column("tenant", rank=6, least=6),
    Column("topic", rank=4, least=13),
    Column("aggregate", rank=1, least=12),
    Column("state", rank=2, least=7),
    Column("why", rank=0, least=6),
    Column("behind", rank=5, least=6),
    Column("since", rank=7, least=20),
    Column("error", rank=2, least=20),
)

MESSAGE_COLUMNS = (
    Column("seq", rank=0, least=3),
    Column("event", rank=0, least=36),
    Column("type", rank=2, least=12),
    Column("state", rank=1, least=7),
    Column("why", rank=0, least=6),
    Column("tries", rank=5, least=5),
    Column("due", rank=4, least=20),
    Column("error", rank=3, least=20, folds=True),
)

AUDIT_COLUMNS = (
    Column("at", rank=0, least=20),
    Column("who", rank=1, least=12),
    Column("did", rank=0, least=6),
    Column("sequence", rank=2, least=SHORT),
    Column("what", rank=0, least=30, folds=True),
)


def print_sequences(found: Sequence[ParkedSequence], *, wide: bool) -> None:
    rows = [_sequence_row(each, wide=wide) for each in found]
    if not show.print_table(SEQUENCE_COLUMNS, rows, wide=wide):
        show.print_error("shortened to fit this terminal; --wide shows all of it")


def _sequence_row(found: ParkedSequence, *, wide: bool) -> list[str]:
    head = found.head
    return [
        found.sequence.hex() if wide else found.sequence.hex()[:SHORT],
        head.consumer,
        head.message.tenant,
        head.message.topic,
        aggregate(head),
        head.state,
        head.why,
        str(found.behind),
        show.when(head.parked_at),
        head.error if wide else _brief(head.error),
    ]


def _brief(error: str) -> str:
    """What it says, without where it comes from, which is the longer half of it."""
    return PLACE.sub("", error)


def aggregate(row: ParkedMessage) -> str:
    return f"{row.message.aggregate_type}/{row.message.aggregate_id}"


def print_sequence(found: ParkedSequence, messages: Sequence[ParkedMessage]) -> None:
    head = found.head
    show.print_facts(
        (label, text)
        for label, text in [
            ("sequence", found.sequence.hex()),
            ("consumer", head.consumer),
            ("tenant", head.message.tenant),
            ("topic", head.message.topic),
            ("aggregate", aggregate(head)),
            ("done", "" if found.mark is None else f"up to number {found.mark}"),
        ]
        if text
    )
    show.print_table(MESSAGE_COLUMNS, [_message_row(each) for each in messages])
    if left := found.behind + 1 - len(messages):
        show.print_line(f"and {left} more; --limit shows more of them")
    if not head.message.refused:
        show.print_line(f"payload of event {head.message.id}: {head.message.payload}")
    _print_refused(messages)


def _print_refused(messages: Sequence[ParkedMessage]) -> None:
    """What to do about stand-ins."""
    for row in messages:
        if not row.message.refused:
            continue
        sequence, id = row.sequence.hex()[:SHORT], row.message.id
        show.print_line(
            f"event {id} came without its payload, for the broker refused it: "
            f"{row.message.refused}. Its row in event_outbox is kept. Give it "
            f"back with `semel parked edit URL {sequence} --event {id} --file FILE`, and then "
            f"`semel parked replay URL {sequence}`"
        )


def _message_row(row: ParkedMessage) -> list[str]:
    return [
        "" if row.message.seq is None else str(row.message.seq),
        row.message.id,
        row.message.type,
        row.state,
        row.why,
        str(row.attempts),
        show.when(row.due_at) if row.due_at else "",
        row.error,
    ]


def print_message(row: ParkedMessage) -> None:
    message = row.message
    show.print_facts(
        (label, text)
        for label, text in [
            ("event", message.id),
            ("type", message.type),
            ("number", "" if message.seq is None else str(message.seq)),
            ("happened", show.when(message.time)),
            ("state", row.state),
            ("why", row.why),
            ("tries", str(row.attempts)),
            ("error", row.error),
            ("waits since", show.when(row.parked_at)),
            ("due", show.when(row.due_at) if row.due_at else ""),
            ("edited", f"{row.edited} times" if row.edited else ""),
            ("refused", message.refused),
            *((f"header {name}", text) for name, text in message.headers.items()),
            ("payload", message.payload),
        ]
        if text
    )
    _print_refused([row])


def print_audit(found: Sequence[Audit]) -> None:
    rows = [
        [show.when(one.at), one.who, one.verb, one.sequence.hex()[:SHORT], one.note]
        for one in found
    ]
    show.print_table(AUDIT_COLUMNS, rows)
