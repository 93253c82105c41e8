"""The format of a record: one line of JSON, then one line with its checksum."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any, Final

from semel.errors import CorruptRecordError
from semel.stores.file.disk import read, reported
from semel.stores.rules import Row
from semel.values import Key, Outcome, State

FORMAT: Final = 1


def pack(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode() + b"\n"
    return body + _seal(body)


def _seal(body: bytes) -> bytes:
    return b'{"sha256": "%s"}\n' % hashlib.sha256(body).hexdigest().encode()


def intact(content: bytes) -> bool:
    body, newline, seal = content.partition(b"\n")
    return seal == _seal(body + newline)


def load(path: str) -> dict[str, Any] | None:
    with reported(path):
        content = read(path)
    if content is None:
        return None
    if not intact(content):
        raise corrupt(path, "its checksum does not match its content")
    fields: dict[str, Any] = json.loads(content[: content.index(b"\n")])
    if fields.get("format") != FORMAT:
        raise corrupt(path, f"its format is {fields.get('format')!r}, this version knows {FORMAT}")
    return fields


def load_row(shard: str, stem: str) -> Row | None:
    path = f"{shard}/{stem}.json"
    fields = load(path)
    if fields is None:
        return None
    if fields.get("id") != stem:
        raise corrupt(path, f"it is the record {fields.get('id')}")
    try:
        return _row_of(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise corrupt(path, f"{type(error).__name__}: {error}") from error


def fields_of(row: Row) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "id": row.key.id.hex(),
        "key": _plain(row.key.text),
        "tenant": _plain(row.key.tenant),
        "operation": _plain(row.key.operation),
        "state": row.state,
        "fingerprint": row.fingerprint.hex(),
        "attempt": _plain(row.attempt),
        "fence": row.fence,
        "number": row.number,
        "hold": row.hold,
        "created_us": row.created_us,
        "started_us": row.started_us,
        "lease_us": row.lease_us,
        "completed_us": row.completed_us,
        "expires_us": row.expires_us,
        "outcome": None if row.outcome is None else _outcome_fields(row.outcome),
        "error": None if row.error is None else _plain(row.error),
        "steps": {_plain(name): _bytes_fields(data) for name, data in row.steps.items()},
        "past": json.loads(row.past),
    }


def _row_of(fields: dict[str, Any]) -> Row:
    outcome, error = fields["outcome"], fields["error"]
    return Row(
        key=Key(
            id=bytes.fromhex(fields["id"]),
            text=_unplain(fields["key"]),
            tenant=_unplain(fields["tenant"]),
            operation=_unplain(fields["operation"]),
        ),
        fingerprint=bytes.fromhex(fields["fingerprint"]),
        attempt=_unplain(fields["attempt"]),
        fence=fields["fence"],
        number=fields["number"],
        state=State(fields["state"]).value,
        hold=fields["hold"],
        created_us=fields["created_us"],
        started_us=fields["started_us"],
        lease_us=fields["lease_us"],
        completed_us=fields["completed_us"],
        expires_us=fields["expires_us"],
        outcome=None if outcome is None else _outcome_of(outcome),
        error=None if error is None else _unplain(error),
        steps={_unplain(name): _bytes_of(data) for name, data in fields["steps"].items()},
        past=json.dumps(fields["past"]),
    )


def _outcome_fields(outcome: Outcome) -> dict[str, Any]:
    return {"kind": outcome.kind, "status": outcome.status, **_bytes_fields(outcome.data)}


def _outcome_of(fields: dict[str, Any]) -> Outcome:
    return Outcome(fields["kind"], _bytes_of(fields), fields["status"])


def _bytes_fields(data: bytes) -> dict[str, str]:
    """Readable where it is text, and the same bytes again either way."""
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _bytes_of(fields: dict[str, str]) -> bytes:
    text = fields.get("text")
    return base64.b64decode(fields["base64"]) if text is None else text.encode()


def _plain(text: str) -> str:
    """The text as JSON brings it back: two lone surrogates in a row would become one character."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")


def _unplain(text: str) -> str:
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogatepass")


def corrupt(path: str, what: str) -> CorruptRecordError:
    return CorruptRecordError(
        f"{path} cannot be read: {what}. Nothing was run. Restore the file, or delete it if the "
        f"effect may happen again"
    )
