"""What a function returned, as bytes, and back: equal to the original, of the same types.

The bytes are JSON. Plain values look as they do anywhere. Everything else is an object whose "$"
says what it was: `(1, 2)` is `{"$":"tuple","v":[1,2]}`. A dict with a "$" of its own is written
as pairs, so it is never taken for one of ours. Bytes that cannot be read raise `DecodingError`
and nothing else.

    plain       what `json` alone writes faithfully
    writing     everything else, as a JSON tree
    reading     and back
    classes     by which name a class is found again
    tagged      `Codec`, and `JSONCodec` made of the above
    failure     errors as outcomes
"""

from semel.codec.classes import type_path
from semel.codec.errors import DecodingError, EncodingError
from semel.codec.failure import decode_error, encode_error, message_of
from semel.codec.tagged import CODEC, Codec, JSONCodec

__all__ = [
    "CODEC",
    "Codec",
    "DecodingError",
    "EncodingError",
    "JSONCodec",
    "decode_error",
    "encode_error",
    "message_of",
    "type_path",
]
