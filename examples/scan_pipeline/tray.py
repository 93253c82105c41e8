"""The scans that nobody has finished, in a store that all processes share.

The tray is the state of one stream. Whoever puts a scan in, or takes one out, appends with the
version that it has seen; if somebody was faster, it looks again. So nothing is lost between two
who write at once, and the stream's bell tells everybody to look.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from semel.colour import ASYNC
from semel.entries import Appended, Keep, Repeated, Replace
from semel.errors import IdempotencyConflictError
from semel.ports import LogStore
from semel.values import Mismatch

STREAM = "scan:tray"


@dataclass(frozen=True)
class Scan:
    """A picture that somebody wants to know about."""

    id: str
    picture: str


class Tray:
    """Put in, taken out, looked at."""

    def __init__(self, store: LogStore) -> None:
        self._log = store.log(ASYNC)

    async def put(self, scan: Scan) -> None:
        """The same scan twice is there once, also when it was taken out meanwhile."""
        await self._change(f"+{scan.id}", scan, lambda scans: [*scans, scan])

    async def take_out(self, scan: Scan) -> None:
        await self._change(f"-{scan.id}", scan, lambda scans: [s for s in scans if s != scan])

    async def look(self) -> list[Scan]:
        return read((await self._log.load(STREAM)).state)

    async def _change(
        self, id: str, scan: Scan, change: Callable[[list[Scan]], list[Scan]]
    ) -> None:
        while True:
            seen = await self._log.load(STREAM)
            scans = [asdict(each) for each in change(read(seen.state))]
            answer = await self._log.append(
                STREAM,
                json.dumps(asdict(scan)).encode(),
                id=id,
                expect=seen.position.offset,
                state=Replace(json.dumps(scans).encode()),
                keep=Keep(entries=100),
            )
            match answer:
                case Appended() | Repeated():
                    return
                case Mismatch():
                    raise IdempotencyConflictError(f"scan {scan.id!r} is of another picture")
                case _:
                    continue  # somebody was faster


def read(state: bytes | None) -> list[Scan]:
    return [Scan(**each) for each in json.loads(state or b"[]")]
