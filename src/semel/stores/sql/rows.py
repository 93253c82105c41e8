"""Between a `Row` and the columns that hold it.

Text goes into the tables readable and comes back to the character: what no database takes in a
text column (NUL, lone surrogates), or separates texts on their way there, is written as a
backslash escape, and a backslash as two. So are characters that the database's encoding lacks
(`codec`, see `encodings`).
Outcome bytes that are JSON are kept in `response`, where people can read and query them. All others
are in `body`, and so is JSON with a character that the encoding lacks. Either way the bytes come
back as they were.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast, get_args

from semel.errors import CorruptRecordError
from semel.stores.rules import Row
from semel.stores.sql.dialects import Dialect
from semel.values import Key, Kind, Outcome, State

COLUMNS = (
    "id",
    "idempotency_key",
    "tenant_id",
    "operation",
    "request_hash",
    "response",
    "body",
    "outcome",
    "status_code",
    "state",
    "attempt",
    "fence",
    "number",
    "hold",
    "steps",
    "past",
    "error",
    "created_at",
    "started_at",
    "lease_until",
    "completed_at",
    "expires_at",
)

# Larger results are for programs; parsing one only to see whether people could read it would
# hold up the event loop.
READABLE_BYTES = 65_536

# PostgreSQL's parser runs out of stack some thousand levels down, and Python's may not.
READABLE_BRACKETS = 1_000

# An indexed column has to stay short (2,704 bytes in PostgreSQL, 3,072 in InnoDB); what is longer
# is cut and its hash put behind it. The identity is the hash in `id`, so nothing is confused.
TENANT_CHARS = 255
KEY_CHARS = 1_024

KINDS = get_args(Kind)
STATES = frozenset(state.value for state in State)


# --- text ---------------------------------------------------------------------------------------

# Between texts that are sent as one, and in place of one that is not there.
SEPARATOR, NOTHING = "\x1f", "\x1e"

_ODD = "\\\\\x00\x1e\ud800-\udfff"
_UNJOINABLE = re.compile(f"[{_ODD}]")
_UNSTORABLE = re.compile(f"[{_ODD}\x1f]")
_ESCAPE = re.compile(r"\\(\\|0|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


def stored_text(text: str, codec: str = "utf-8") -> str:
    text = _UNSTORABLE.sub(_escaped, text) if _UNSTORABLE.search(text) else text
    if codec == "utf-8" or takes(text, codec):
        return text
    return text.encode(codec, "backslashreplace").decode(codec)


def takes(text: str, codec: str) -> bool:
    """Return whether the codec has all of these characters; always True for UTF-8."""
    if codec == "utf-8" or text.isascii():
        return True
    try:
        text.encode(codec)
    except UnicodeEncodeError:
        return False
    return True


def stored_texts(texts: Sequence[str], codec: str = "utf-8") -> str:
    """Several texts as one, each escaped."""
    return _if_plain(texts, codec) or SEPARATOR.join([stored_text(text, codec) for text in texts])


def _if_plain(texts: Sequence[str], codec: str) -> str | None:
    """The texts as one; None when one of them has to be escaped. Mostly one look at all tells."""
    together = SEPARATOR.join(texts)
    if together.count(SEPARATOR) >= len(texts) or _UNJOINABLE.search(together):
        return None
    return together if takes(together, codec) else None


def stored_name(text: str, codec: str) -> str:
    """Return a name as its column stores it: as it is for UTF-8, otherwise with escapes."""
    return text if codec == "utf-8" else stored_text(text, codec)


def original_name(stored: str, codec: str) -> str:
    return stored if codec == "utf-8" else original_text(stored)


def stored_document(text: str, codec: str) -> str:
    """A JSON document that reads back to the byte; with escapes, it begins with a backslash."""
    return text if takes(text, codec) else "\\" + stored_text(text, codec)


def original_document(stored: str) -> str:
    return original_text(stored[1:]) if stored.startswith("\\") else stored


def stored_json(text: str, codec: str) -> str:
    """A JSON document with the same content, in characters that the encoding has."""
    return text if takes(text, codec) else _NOT_ASCII.sub(_json_escaped, text)


def _json_escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


def _escaped(found: re.Match[str]) -> str:
    char = found[0]
    return {"\\": "\\\\", "\x00": "\\0"}.get(char) or f"\\u{ord(char):04x}"


def original_text(text: str) -> str:
    return _ESCAPE.sub(_unescaped, text) if "\\" in text else text


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    return {"\\": "\\", "0": "\x00"}.get(code) or chr(int(code[1:], 16))


def shortened(text: str, limit: int, codec: str = "utf-8") -> str:
    """Stored text of at most `limit` characters, different for different texts."""
    stored = stored_text(text, codec)
    if len(stored) <= limit:
        return stored
    digest = hashlib.sha256(stored.encode()).hexdigest()
    mark = "\u2026" if takes("\u2026", codec) else "~"
    return f"{stored[: limit - 65]}{mark}{digest}"


def shortened_texts(texts: Sequence[str], limit: int, codec: str = "utf-8") -> str:
    """Several texts as one, each shortened."""
    together = _if_plain(texts, codec) if max(map(len, texts)) <= limit else None
    return together or SEPARATOR.join([shortened(text, limit, codec) for text in texts])


# --- outcomes -----------------------------------------------------------------------------------


def readable(data: bytes) -> str | None:
    """The bytes as JSON text, or None when they are not JSON or too much of it."""
    if not data or len(data) > READABLE_BYTES:
        return None
    if data.count(b"[") + data.count(b"{") > READABLE_BRACKETS:
        return None
    try:
        text = data.decode()
        _JSON.decode(text)
    except (ValueError, RecursionError):
        return None
    return text


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refused)


def split(outcome: Outcome, codec: str = "utf-8") -> tuple[str | None, bytes | None]:
    """`response` and `body`: one of them holds the bytes."""
    text = readable(outcome.data)
    if text is None or not takes(text, codec):
        return None, outcome.data
    return text, None


def joined(kind: Any, status: Any, response: Any, body: Any) -> Outcome:
    """The outcome, to the byte; `ValueError` if it cannot be one.

    A row that another program has completed may have no kind.
    """
    kind = "value" if kind is None else kind
    if kind not in KINDS or (response is None and body is None):
        raise ValueError("a completed record without an outcome")
    data = bytes(body) if response is None else response.encode()
    return Outcome(cast("Kind", kind), data, None if status is None else int(status))


# --- steps and past -----------------------------------------------------------------------------


def stored_steps(steps: Mapping[str, bytes], codec: str = "utf-8") -> str | None:
    if not steps:
        return None
    told = {stored_text(name, codec): stored_bytes(data) for name, data in steps.items()}
    return _dumps(told)


# Without \uXXXX: PostgreSQL's jsonb refuses it for characters that the encoding lacks.
_dumps = json.JSONEncoder(ensure_ascii=False).encode


def stored_bytes(data: bytes) -> str:
    return base64.b64encode(data).decode()


def original_steps(text: str | None) -> dict[str, bytes]:
    if text is None:
        return {}
    steps = json.loads(text)
    return {original_text(name): base64.b64decode(data) for name, data in steps.items()}


def stored_past(past: str, codec: str = "utf-8") -> str | None:
    if past == "[]":
        return None
    return _dumps(_each_text(past, lambda text: stored_text(text, codec)))


def original_past(text: str | None) -> str:
    return "[]" if text is None else json.dumps(_each_text(text, original_text))


def _each_text(past: str, change: Callable[[str], str]) -> list[list[Any]]:
    """The past with every attempt and ending changed."""
    return [
        [number, fence, change(attempt), started, ended, change(ending)]
        for number, fence, attempt, started, ended, ending in json.loads(past)
    ]


# --- rows ---------------------------------------------------------------------------------------


def values_of(row: Row, dialect: Dialect) -> list[Any]:
    """The row's values in the order of `COLUMNS`."""
    stamp, codec = dialect.stamp, dialect.codec
    response, body = (None, None) if row.outcome is None else split(row.outcome, codec)
    return [
        row.key.id,
        shortened(row.key.text, KEY_CHARS, codec),
        shortened(row.key.tenant, TENANT_CHARS, codec),
        stored_text(row.key.operation, codec),
        row.fingerprint.hex(),
        response,
        body,
        None if row.outcome is None else row.outcome.kind,
        None if row.outcome is None else row.outcome.status,
        row.state,
        stored_text(row.attempt, codec),
        row.fence,
        row.number,
        row.hold,
        stored_steps(row.steps, codec),
        stored_past(row.past, codec),
        None if row.error is None else stored_text(row.error, codec),
        stamp(row.created_us),
        stamp(row.started_us),
        stamp(row.lease_us),
        None if row.completed_us is None else stamp(row.completed_us),
        None if row.expires_us is None else stamp(row.expires_us),
    ]


def row_of(values: Sequence[Any], dialect: Dialect) -> Row:
    """The row in these columns; `CorruptRecordError`, naming the key, when it cannot be read."""
    try:
        return _row(values, dialect)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise corrupt(bytes(values[0]), values[1], error) from error


def corrupt(id: bytes, text: Any, why: object) -> CorruptRecordError:
    return CorruptRecordError(
        f"the record of key {text!r} (id {id.hex()}) in table idempotency cannot be read: {why}; "
        "it is left as it is; correct or delete that row"
    )


def _row(values: Sequence[Any], dialect: Dialect) -> Row:
    v = dict(zip(COLUMNS, values, strict=True))
    if v["state"] not in STATES:
        raise ValueError(f"state {v['state']!r}")
    done = v["state"] == State.COMPLETED or v["outcome"] is not None
    us = dialect.micros
    return Row(
        key=Key(
            bytes(v["id"]),
            original_text(v["idempotency_key"]),
            original_text(v["tenant_id"]),
            original_text(v["operation"]),
        ),
        fingerprint=bytes.fromhex(v["request_hash"]),
        attempt=original_text(v["attempt"]),
        fence=int(v["fence"]),
        number=int(v["number"]),
        state=v["state"],
        hold=bool(v["hold"]),
        created_us=us(v["created_at"]),
        started_us=us(v["started_at"]),
        lease_us=us(v["lease_until"]),
        completed_us=None if v["completed_at"] is None else us(v["completed_at"]),
        expires_us=None if v["expires_at"] is None else us(v["expires_at"]),
        outcome=joined(v["outcome"], v["status_code"], v["response"], v["body"]) if done else None,
        error=None if v["error"] is None else original_text(v["error"]),
        steps=original_steps(v["steps"]),
        past=original_past(v["past"]),
    )
