"""What waits in an inbox, for people: look at it, correct it, run it again, go on without it.

    parked = Parked(inbox)
    for each in await parked.list(state="parked"):
        print(each.sequence.hex(), each.head.why, each.head.error, each.behind)

    await parked.edit(sequence, event_id, '{"total": 40}')
    await parked.replay(sequence)                  # in order, by the worker, from the first on
    await parked.skip(sequence, dry_run=True)      # what would it do?

A sequence is named as a listing shows it: 32 bytes, or their 64 hexadecimal digits. Whatever is
changed is audited, with who did it.

The easy mistake is to skip what should be replayed. A message that was skipped is never run: its
mark has moved on. Correct it with `edit` and replay it, or ask with `dry_run` first.
"""

from __future__ import annotations

import builtins
import getpass
import platform
from collections.abc import Sequence
from typing import Literal, TypeAlias

from semel.errors import SettingsError
from semel.messages import (
    Audit,
    Edit,
    ParkedMessage,
    ParkedSequence,
    Replay,
    Settled,
    Settlement,
    Skip,
)
from semel.ports import ParkedStore

__all__ = ["Parked"]

SequenceLike: TypeAlias = bytes | str
State: TypeAlias = Literal["waiting", "parked"]

# So many sequences are looked at together when all of a kind are replayed.
PAGE = 100


class Parked:
    """An inbox' waiting messages. `who` is written into the audit; without it, user@host."""

    def __init__(self, inbox: ParkedStore, *, who: str | None = None) -> None:
        self._inbox = inbox
        self._who = _somebody() if who is None else who
        if not self._who.strip():
            raise SettingsError(f"who={who!r} must name whoever makes the change")

    async def list(
        self,
        *,
        consumer: str | None = None,
        topic: str | None = None,
        tenant: str | None = None,
        state: State | None = None,
        limit: int = 100,
        after: SequenceLike | None = None,
    ) -> Sequence[ParkedSequence]:
        """Sequences that wait: the first message of each, and how many wait behind it.

        `state="parked"`: only those that wait for people. The next page begins `after` the last.
        """
        return await self._inbox.sequences(
            consumer=consumer,
            topic=topic,
            tenant=tenant,
            state=state,
            limit=limit,
            after=None if after is None else _id(after),
        )

    async def show(
        self, sequence: SequenceLike, *, limit: int = 1000, after: int = 0
    ) -> Sequence[ParkedMessage]:
        """The messages of a sequence that wait, in order; the next page begins `after` a number."""
        found = await self._inbox.waiting(_id(sequence), limit=limit, after=after)
        if not found and not after:
            raise SettingsError(f"nothing of sequence {_id(sequence).hex()} waits")
        return found

    async def edit(
        self,
        sequence: SequenceLike,
        event_id: str,
        payload: str,
        *,
        note: str = "",
        dry_run: bool = False,
    ) -> Settled:
        """Give a message that waits another payload, as JSON. It keeps its number and its id."""
        return await self._settle(sequence, Edit(event_id, payload), note, dry_run=dry_run)

    async def replay(
        self,
        sequence: SequenceLike,
        *,
        force: bool = False,
        note: str = "",
        dry_run: bool = False,
    ) -> Settled:
        """Have the sequence run now, in order, as if its first message had never failed.

        The consumer's worker does it. A message without a number that waits for longer than the
        inbox remembers is refused, unless `force`: nothing tells whether it has had its effect.
        """
        return await self._settle(sequence, Replay(force), note, dry_run=dry_run)

    async def skip(
        self,
        sequence: SequenceLike,
        event_id: str | None = None,
        *,
        note: str = "",
        dry_run: bool = False,
    ) -> Settled:
        """Go on without the first message of the sequence, which is never run.

        When it waits for others that have not come, go on without those, and run it; unless
        `event_id` names it. Give `event_id` to be sure that no other message is meant; one that may
        run and has not failed is refused without.
        """
        return await self._settle(sequence, Skip(event_id), note, dry_run=dry_run)

    async def replay_all(
        self,
        *,
        consumer: str | None = None,
        topic: str | None = None,
        tenant: str | None = None,
        state: State | None = "parked",
        force: bool = False,
        note: str = "",
        dry_run: bool = False,
    ) -> Sequence[Settled | SettingsError]:
        """Replay every sequence of a kind; what cannot be is told beside the others."""
        told: builtins.list[Settled | SettingsError] = []
        after: bytes | None = None
        while page := await self._inbox.sequences(
            consumer=consumer, topic=topic, tenant=tenant, state=state, limit=PAGE, after=after
        ):
            after = page[-1].sequence
            for each in page:
                try:
                    told.append(
                        await self.replay(each.sequence, force=force, note=note, dry_run=dry_run)
                    )
                except SettingsError as refusal:
                    told.append(refusal)
        return told

    async def audit(
        self, *, sequence: SequenceLike | None = None, limit: int = 100
    ) -> Sequence[Audit]:
        """What was changed, by whom and when, the last first."""
        id = None if sequence is None else _id(sequence)
        return await self._inbox.audit(sequence=id, limit=limit)

    async def _settle(
        self, sequence: SequenceLike, settlement: Settlement, note: str, *, dry_run: bool
    ) -> Settled:
        return await self._inbox.settle(
            _id(sequence), settlement, who=self._who, note=note, dry_run=dry_run
        )


def _id(given: SequenceLike) -> bytes:
    found: object = given
    if isinstance(found, str):
        try:
            found = bytes.fromhex(found)
        except ValueError:
            found = b""
    if not isinstance(found, bytes) or len(found) != 32:  # noqa: PLR2004 - a SHA-256
        raise SettingsError(
            f"{given!r} names no sequence; give the 64 hexadecimal digits that a listing shows"
        )
    return found


def _somebody() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container may have no name for its user
        user = "unknown"
    return f"{user}@{platform.node()}"
