"""Errors as outcomes: a recorded failure is raised again where it can be."""

from __future__ import annotations

from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any

from semel.codec.classes import find_loaded, type_path
from semel.codec.errors import DecodingError, EncodingError
from semel.codec.reading import need
from semel.codec.tagged import CODEC
from semel.errors import ReplayedError


def encode_error(error: BaseException) -> bytes:
    """A failure as bytes: its type, its message, and what is needed to build it again.

    Never refuses: an error whose arguments or attributes cannot be stored keeps its message.
    """
    record: dict[str, Any] = {"type": type_path(type(error)), "message": message_of(error)}
    if notes := _notes(error):
        record["notes"] = notes
    if isinstance(error, BaseExceptionGroup):
        record["parts"] = [_line(part) for part in error.exceptions]
    if error.__cause__ is not None:
        record["cause"] = [type_path(type(error.__cause__)), message_of(error.__cause__)]
    try:
        return CODEC.encode(record | _ingredients(error))
    except EncodingError:
        return CODEC.encode(record)


def decode_error(data: bytes) -> BaseException:
    """The recorded failure, to be raised again; a `ReplayedError` where its type cannot be had.

    Its `str()` is that of the original. Only an `Exception` comes back as itself: a stored
    `SystemExit` or cancellation must not stop whoever replays it.
    """
    record = CODEC.decode(data)
    try:
        path, message = need(record, "type", str), need(record, "message", str)
        error = _rebuilt(record) or ReplayedError(message, type_path=path)
        return _with_context(error, record)
    except Exception as problem:
        raise DecodingError("the stored error is not a record of one") from problem


def message_of(error: BaseException) -> str:
    """What the error says; nothing, if saying it fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ is no reason to lose the failure
        return ""


def _line(error: BaseException) -> str:
    return f"{type_path(type(error))}: {message_of(error)}"


def _notes(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", ()) if type(note) is str]


def _ingredients(error: BaseException) -> dict[str, Any]:
    """Arguments and attributes. Slots are not read: such a class is not rebuilt."""
    kind = type(error)
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        return {}
    given, state = _reduced(error)
    state = {name: value for name, value in state.items() if name != "__notes__"}
    return {"args": error.args, "given": given, "state": state}


def _reduced(error: BaseException) -> tuple[Any, dict[str, Any]]:
    """C code knows what `args` leaves out, such as the file name of an OSError."""
    reduced: Any = ()
    if isinstance(type(error).__reduce__, MethodDescriptorType):
        reduced = error.__reduce__()
    given = reduced[1] if len(reduced) > 1 else error.args
    return given, reduced[2] if len(reduced) > 2 and reduced[2] else vars(error)  # noqa: PLR2004


def _rebuilt(record: dict[str, Any]) -> Exception | None:
    """The original again, or None unless it is sure to be the same."""
    kind = find_loaded(record["type"])
    if "args" not in record or not isinstance(kind, type) or not issubclass(kind, Exception):
        return None
    try:
        error = _made(kind, record["given"])
        for name, value in {**record["state"], "args": record["args"]}.items():
            object.__setattr__(error, name, value)
        return error if type(error) is kind and str(error) == record["message"] else None
    except Exception:  # noqa: BLE001 - whatever the class does when built, the message is left
        return None


def _made(kind: type[Exception], given: tuple[Any, ...]) -> Exception:
    """A constructor in Python may want other arguments than `args`; one in C does not."""
    if isinstance(kind.__init__, WrapperDescriptorType):
        return kind(*given)
    return kind.__new__(kind, *given)


def _with_context(error: Exception, record: dict[str, Any]) -> Exception:
    for note in [*record.get("notes", ()), *record.get("parts", ())]:
        error.add_note(note)
    if "cause" in record:
        path, message = record["cause"]
        error.__cause__ = ReplayedError(message, type_path=path)
    return error
