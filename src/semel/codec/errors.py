"""What the codec raises."""

from __future__ import annotations

from semel.errors import SemelError


class EncodingError(SemelError, TypeError):
    """The value cannot be stored so that it comes back as it was. The message names the spot."""


class DecodingError(SemelError, ValueError):
    """The bytes cannot be turned back into a value here. The message says what would help."""
