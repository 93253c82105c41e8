"""A request's body: read whole before anything is claimed, and handed on as it came.

Nothing is held while it arrives: a client that sends a byte a minute keeps its connection busy,
and no key. What is larger than some memory is fair goes to a file that has no name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import IO

from semel.http import protocol
from semel.http.protocol import Refusal

# Up to here a body is kept in memory.
IN_MEMORY = 1024 * 1024

# How much of a spooled body is handed on at a time.
PIECE = 64 * 1024


class Body:
    """Pieces in, the whole out; larger than `most`, it is refused."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pieces: list[bytes] = []
        self._file: IO[bytes] | None = None
        self.size = 0

    @property
    def spooled(self) -> bool:
        return self._file is not None

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        if self.size > self._most:
            self.close()
            raise too_large(self._most)
        if self._file is None and self.size > IN_MEMORY:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
            self._file.writelines(self._pieces)
            self._pieces.clear()
        if self._file is None:
            self._pieces.append(piece)
        else:
            self._file.write(piece)

    def whole(self) -> bytes:
        """All of it, in memory; for fingerprints that have to see it all at once."""
        if self._file is None:
            return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._file.seek(0)
        return self._file.read()

    def feed(self, update: Callable[[bytes], None]) -> None:
        """Piece by piece, to a hash."""
        for piece in self._pieces:
            update(piece)
        if self._file is not None:
            self._file.seek(0)
            while piece := self._file.read(PIECE):
                update(piece)

    def rewind(self) -> None:
        if self._file is not None:
            self._file.seek(0)

    def next(self) -> bytes:
        """The next piece of a spooled body; empty at its end."""
        return b"" if self._file is None else self._file.read(PIECE)

    def as_file(self) -> IO[bytes] | None:
        self.rewind()
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._pieces = []


def too_large(most: int) -> Refusal:
    return Refusal(
        protocol.problem(
            "body-too-large",
            f"A request with an Idempotency-Key may have at most {most} bytes here. Nothing was "
            "done.",
        )
    )


def check_length(content: str | None, most: int) -> None:
    """Refuse at once what says itself that it is too large."""
    if content is None or not (content.isascii() and content.isdigit()):
        return
    digits = content.lstrip("0")
    if len(digits) > protocol.DIGITS or int(digits or "0") > most:
        raise too_large(most)
