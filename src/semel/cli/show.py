"""How answers look: tables for a terminal, tab-separated lines for a pipe, JSON for programs.

Keys, errors and results were written by somebody else. On their way to a terminal they are
neither markup nor control sequences: what does not print is escaped. The fields of the JSON are
a promise, kept in docs/reference/cli.md.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import unquote

from rich.console import Console
from rich.table import Table
from rich.text import Text

from semel.admin import Reading, Story, Try
from semel.cli.table import Column, print_fitted
from semel.values import Guarantees, Record, State

Json = dict[str, Any]

# Enough to recognise a result by; --json has all of it.
SHOWN = 2000

HIDDEN = "***"

# Wider than any row of cells that are at most SHOWN wide.
ENDLESS = 100_000


# --- secrets ------------------------------------------------------------------------------------

# Log records are redacted, and a client may choose their text: both expressions take linear time.
# The first begins at the last character of the scheme, and matches up to the next blank or quote,
# also without an `@`.
_CREDENTIALS = re.compile(r"(?P<head>[\w+.-]://[^\s:/@?#]*):(?P<rest>[^\s'\"]*)")
_PARAMETER = re.compile(
    r"(?i)(?P<head>[?&;](?:[\w-]*passw(?:or)?d|[\w-]*secret|[\w-]*token)=)[^&\s'\"]+"
)


def redact(text: str, url: str = "") -> str:
    """The text without the passwords of URLs in it, nor that of this URL on its own."""
    for secret in _secrets(url):
        text = text.replace(secret, HIDDEN)
    text = _CREDENTIALS.sub(_without_password, text)
    return _PARAMETER.sub(rf"\g<head>{HIDDEN}", text)


def _without_password(found: re.Match[str]) -> str:
    _, at, after = found["rest"].rpartition("@")
    return f"{found['head']}:{HIDDEN}@{after}" if at else found[0]


def _secrets(url: str) -> list[str]:
    """The password, however it is written, and the parts that a reader of URLs may take it for.

    Nothing is said of one that is not quoted as it should be: its `/` ends the host, its `@` begins
    it. Of NATS, a name without a password is a token.
    """
    scheme, _, rest = url.partition("://") if "://" in url else url.partition(":")
    access, _, _ = rest.rpartition("@")
    name, colon, password = access.partition(":")
    secret = password if colon or scheme not in _TOKENS else name
    parts = [part for part in re.split("[/@?#:]", secret) if len(part) >= _TELLING]
    return [each for each in (secret, unquote(secret), *parts) if each]


_TOKENS = {"nats", "tls", "ws", "wss"}

# A shorter part of a password tells nothing, and hidden everywhere it would leave little to read.
_TELLING = 4


# --- for programs -------------------------------------------------------------------------------


def print_json(data: Json) -> None:
    """ASCII only: it reads the same in every terminal and every pipe."""
    print(json.dumps(data, indent=2))  # noqa: T201 - answers go to stdout


def record_json(record: Record) -> Json:
    """A record as `list` gives it."""
    return {
        "id": record.key.id.hex(),
        "key": record.key.text,
        "tenant": record.key.tenant,
        "operation": record.key.operation,
        "state": record.state.value,
        "number": record.number,
        "fence": record.fence,
        "holder": record.holder,
        "held": held(record),
        "created_at": iso(record.created_at),
        "started_at": iso(record.started_at),
        "lease_until": iso(record.lease_until),
        "completed_at": iso(record.completed_at),
        "expires_at": iso(record.expires_at),
        "error": record.error,
    }


def held(record: Record) -> bool | None:
    """Does it stay until its outcome is known? Of one that is settled, nobody asks."""
    return record.held if record.state in (State.PENDING, State.UNKNOWN) else None


def story_json(story: Story, child: str | None = None) -> Json:
    """A record with all that `explain` adds."""
    outcome = story.record.outcome
    status = None if outcome is None else outcome.status
    return {
        "found": True,
        **record_json(story.record),
        "lease_left_s": story.lease_left_s,
        "tries": [_try_json(one) for one in story.tries],
        "forgotten_tries": story.forgotten,
        "steps": {name: _reading_json(step) for name, step in story.steps.items()},
        "outcome": story.outcome and {**_reading_json(story.outcome), "status": status},
        "next_call": {"does": story.next_call.does, "sentence": story.next_call.sentence},
        "child_key": child,
    }


def _try_json(one: Try) -> Json:
    return {
        "number": one.number,
        "fence": one.fence,
        "holder": one.holder,
        "started_at": iso(one.started_at),
        "ended_at": iso(one.ended_at),
        "ending": one.ending,
    }


def _reading_json(reading: Reading) -> Json:
    return {
        "kind": reading.kind,
        "decoded": reading.decoded,
        "text": reading.text,
        "base64": base64.b64encode(reading.data).decode(),
    }


def guarantees_json(found: Guarantees) -> Json:
    return {
        "store": found.store,
        "survives": sorted(found.survives),
        "shared": found.shared,
        "why": list(found.why),
    }


def iso(moment: datetime | None) -> str | None:
    """ISO 8601 in UTC, always with microseconds, so that texts compare as times do."""
    if moment is None:
        return None
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


# --- for people ---------------------------------------------------------------------------------


RECORD_COLUMNS = (
    Column("key", rank=0, least=12),
    Column("tenant", rank=2, least=6),
    Column("operation", rank=4, least=12),
    Column("state", rank=1, least=9),
    Column("try", rank=6, least=3),
    Column("holder", rank=5, least=10),
    Column("started", rank=3, least=20),
    Column("expires", rank=7, least=20),
)
ID_COLUMN = Column("id", rank=0, least=64)  # half an id finds nothing

TRY_COLUMNS = (
    Column("try", rank=0, least=3),
    Column("holder", rank=3, least=12),
    Column("fence", rank=2, least=16),
    Column("started", rank=1, least=20),
    Column("ended", rank=4, least=20),
    Column("ending", rank=0, least=12, folds=True),
)
STEP_COLUMNS = (
    Column("step", rank=0, least=8, folds=True),
    Column("result", rank=0, least=20, folds=True),
)


def print_records(records: Sequence[Record], *, ids: bool, wide: bool) -> None:
    columns = [*RECORD_COLUMNS, ID_COLUMN] if ids else list(RECORD_COLUMNS)
    rows = [_record_row(record)[: len(columns)] for record in records]
    whole = print_table(columns, rows, wide=wide)
    if not whole:
        print_error("shortened to fit this terminal; --wide shows all of it")


def _record_row(record: Record) -> list[str]:
    return [
        record.key.text,
        record.key.tenant,
        record.key.operation,
        record.state.value,
        str(record.number),
        record.holder,
        when(record.started_at),
        when(record.expires_at) if record.expires_at else "never",
        record.key.id.hex(),
    ]


def print_story(story: Story, child: str | None = None) -> None:
    print_facts([*_facts(story), *([("child key", child)] if child else [])])
    if story.forgotten:
        print_line(f"The first {story.forgotten} tries are no longer kept.")
    print_table(TRY_COLUMNS, [_try_row(one) for one in story.tries])
    if story.steps:
        print_table(STEP_COLUMNS, [[name, step.text] for name, step in story.steps.items()])
    who = "request" if story.http else "call"
    print_line(f"The next {who} {story.next_call.sentence}.")


def _facts(story: Story) -> list[tuple[str, str]]:
    record = story.record
    facts = [
        ("key", record.key.text),
        ("tenant", record.key.tenant),
        ("operation", record.key.operation),
        ("id", record.key.id.hex()),
        ("state", record.state.value),
        ("lease", _lease(story.lease_left_s)),
        ("held", "until its outcome is known" if held(record) else ""),
        ("created", when(record.created_at)),
        ("expires", when(record.expires_at) if record.expires_at else "never"),
    ]
    if story.outcome is not None:
        facts.append((story.outcome.kind, story.outcome.text))
    return [(label, text) for label, text in facts if text]


def _try_row(one: Try) -> list[str]:
    ended = when(one.ended_at) if one.ended_at else ""
    return [str(one.number), one.holder, str(one.fence), when(one.started_at), ended, one.ending]


def _lease(left_s: float | None) -> str:
    if left_s is None:
        return ""
    return f"{span(left_s)} left" if left_s > 0 else f"ran out {span(-left_s)} ago"


def span(seconds: float) -> str:
    """A duration in its two largest units."""
    if seconds < 60:  # noqa: PLR2004
        return f"{seconds:.1f} s"
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days} d {h} h"
    return f"{hours} h {m} min" if hours else f"{minutes} min {s} s"


def when(moment: datetime) -> str:
    """A time for people."""
    return f"{moment:%Y-%m-%d %H:%M:%S}Z"


def print_guarantees(found: Guarantees) -> None:
    print_facts(
        [
            ("store", found.store),
            ("survives", ", ".join(sorted(found.survives)) or "nothing"),
            ("shared", "between processes" if found.shared else "no: this process only"),
            *(("why", reason) for reason in found.why),
        ]
    )


def print_line(text: str) -> None:
    """A sentence, not wrapped, whatever its characters."""
    print(clean(text))  # noqa: T201 - answers go to stdout


def print_error(text: str) -> None:
    """A sentence about what went wrong, on stderr, in one line however a driver wrote it."""
    sys.stderr.write(f"semel: {clean(' '.join(text.split()))}\n")


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Label and value, line by line."""
    console = Console(highlight=False)
    if not console.is_terminal:
        for fact in facts:
            print_line_of(fact)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in facts:
        grid.add_row(label, Text(clean(shorten(text))))
    console.print(grid)


def print_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], *, wide: bool = False
) -> bool:
    """A table on a terminal; one line per row, cells parted by tabs, else. Was it all shown?"""
    console = Console(highlight=False)
    if not console.is_terminal:
        print_line_of(column.name for column in columns)
        for row in rows:
            print_line_of(row)
        return True
    cleaned = [[clean(shorten(cell)) for cell in row] for row in rows]
    return print_fitted(columns, cleaned, width=ENDLESS if wide else console.width)


def print_line_of(cells: Iterable[str]) -> None:
    print("\t".join(clean(shorten(cell)) for cell in cells))  # noqa: T201


def shorten(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def clean(text: str) -> str:
    """What does not print, escaped: no tab breaks a row, no sequence reaches the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
