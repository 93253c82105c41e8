"""The codec: what it promises, and the one that is used unless another is given."""

from __future__ import annotations

from typing import Any, Protocol

from semel.codec.errors import DecodingError
from semel.codec.plain import PLAIN_TEXT, SMALL, TooMuchError, is_plain, small_text, to_text
from semel.codec.reading import scan_plain, scan_tagged
from semel.codec.writing import Walk, encode_walking


class Codec(Protocol):
    """Turns results into bytes.

    What `decode` gives for the bytes of `encode` equals the original. A value for which that
    cannot be promised is refused with `EncodingError`.
    """

    def encode(self, value: Any) -> bytes:
        """The value as bytes."""
        ...

    def decode(self, data: bytes) -> Any:
        """The value again; `DecodingError` when the bytes cannot be read here."""
        ...


class JSONCodec:
    """The codec used unless another is given: readable JSON, type-faithful, no pickle."""

    def encode(self, value: Any) -> bytes:
        """The value as JSON in UTF-8, valid for any reader."""
        kind = type(value)
        try:
            if kind in PLAIN_TEXT:
                return PLAIN_TEXT[kind](value).encode()
            if kind is dict and len(value) <= SMALL and (text := small_text(value)):
                return text.encode()
            if is_plain(value):
                return to_text(value).encode()
        except TooMuchError as much:
            Walk("result").refuse(type(value), str(much))
        except (ValueError, TypeError, RuntimeError):
            # NaN, a huge integer, a lone surrogate, or a value that another thread changes
            # under us: the walk writes it, or names it.
            pass
        return encode_walking(value)

    def decode(self, data: bytes) -> Any:
        """The value again, rebuilt from loaded modules only."""
        scan = scan_tagged if b'"$"' in data else scan_plain
        try:
            text = data.decode()
            value, end = scan(text, 0)
        except DecodingError:
            raise
        except StopIteration:
            raise DecodingError("the stored result is not JSON; was it written by us?") from None
        except Exception as error:
            raise DecodingError(
                f"the stored result cannot be read: {type(error).__name__}: {error}"
            ) from error
        if end != len(text):
            raise DecodingError("the stored result goes on after its end; was it written by us?")
        return value


CODEC: Codec = JSONCodec()
