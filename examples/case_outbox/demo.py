"""Four people and their cases; two processes are killed on the way, and one scan cannot be read.

The relay and the OCR worker are processes of their own, started as one does in earnest, with
`semel relay` and `semel worker`; these are killed. The other three services run here. Exits 0
when every event that was committed had its effects, each once, and each case in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from uuid import uuid4

import consumers
from books import Books
from office import UNREADABLE, Office
from pieces import BROKER, DATABASE, GROUPS, LEASE_S, WORKERS, broker, close, prepare

from semel.inbox import SQLInbox
from semel.messages import ParkedSequence
from semel.parked import Parked
from semel.relay import Relay
from semel.stores.sql import SQLStore

HERE = Path(__file__).parent

PEOPLE = 4
PAUSE_S = 0.03

WITHIN_S = 90.0

INDENT = 5 * " "
COLOURS = re.compile(r"\x1b\[[0-9;]*m")

COMMANDS = {
    "relay": ("relay", DATABASE, "--to", BROKER, "--lease", f"{LEASE_S:g}s"),
    "ocr": ("worker", "consumers:ocr"),
}


# --- processes
class Party:
    """The relay and the OCR worker."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str) -> None:
        for name in names:
            words = [sys.executable, "-m", "semel", *COMMANDS[name], "--quiet"]
            with self._log(name).open("ab") as log:
                self._running[name] = subprocess.Popen(
                    words, cwd=HERE, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )

    def kill(self, *names: str) -> None:
        for name in names:
            self._running[name].kill()
        for name in names:
            self._running.pop(name).wait()

    def check(self) -> None:
        for name, process in self._running.items():
            if process.poll() is not None:
                sys.exit(f"{name} has ended by itself:\n{self._log(name).read_text()}")

    def end(self) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.wait()

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


@contextlib.asynccontextmanager
async def started() -> AsyncIterator[Party]:
    """All five, until the block ends."""
    workers = [consumers.vision, consumers.synapse, consumers.watch]
    with tempfile.TemporaryDirectory(prefix="semel-cases-") as folder:
        logging.basicConfig(filename=Path(folder, "here.log"), level=logging.WARNING)
        party = Party(Path(folder))
        running = [asyncio.create_task(worker.run()) for worker in workers]
        try:
            party.start(*COMMANDS)
            yield party
        finally:
            party.end()
            for worker in workers:
                worker.stop()
            await asyncio.gather(*running)


async def semel(*words: str) -> None:
    """Type a command, and show what it says on a terminal."""
    say(f"   $ semel {shlex.join(words)}")
    width = shutil.get_terminal_size((120, 24)).columns - len(INDENT)
    terminal = {"TTY_COMPATIBLE": "1", "TERM": "xterm", "COLUMNS": str(width)}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "semel", *words],
        env={**os.environ, **terminal, "SEMEL_URL": DATABASE},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    for line in COLOURS.sub("", done.stdout or done.stderr).splitlines():
        say(f"{INDENT}{line.rstrip()}")


# --- the story
async def main(cases: int) -> int:
    await prepare()
    store = SQLStore(DATABASE)
    try:
        async with started() as party:
            good = await Story(party, store, cases).tell()
    finally:
        await store.aclose()
        await consumers.inbox.aclose()
        await close()
    say()
    say("All as promised." if good else "NOT as promised.")
    return 0 if good else 1


class Story:
    """What happens, and what is said of it."""

    def __init__(self, party: Party, store: SQLStore, cases: int) -> None:
        self._cases = cases
        self._party = party
        self._relay = Relay(store, broker)  # to ask how far the other one is; it does not run
        self._parked = Parked(SQLInbox(store))
        self._run = uuid4().hex[:6]
        self._spoilt = f"{self._run}-8"
        self._books = Books(f"{self._run}-")
        self._over = False

    async def tell(self) -> bool:
        try:
            return await self._tell()
        finally:
            self._over = True  # a thread is not cancelled, and would be waited for

    async def _tell(self) -> bool:
        say(f"1. {PEOPLE} people work on {self._cases} cases, beside a relay and four services")
        people = [Office(seed, PAUSE_S) for seed in range(PEOPLE)]
        ids = [f"{self._run}-{number}" for number in range(self._cases)]
        await asyncio.to_thread(self._work, people[0], ids[:1])
        await self._until(self._all_is_done)  # by then everybody is at work
        await asyncio.gather(
            *(
                asyncio.to_thread(self._work, office, ids[1 + number :: PEOPLE])
                for number, office in enumerate(people)
            ),
            self._kill_and_start(),
        )
        await self._look_at_what_waits()
        await self._settle()
        return self._count(sum(office.taken_back for office in people))

    def _work(self, office: Office, ids: Sequence[str]) -> None:
        for id in ids:
            if self._over:
                return
            office.work_on(id, scan=UNREADABLE if id == self._spoilt else "a lease")

    async def _kill_and_start(self) -> None:
        await self._until(self._ocr_is_in_the_middle, look_s=0.01)
        self._party.kill("ocr", "relay")
        say("2. In the middle of it, the relay and the OCR worker are killed (kill -9)")
        committed = sum(len(self._books.committed(topic)) for topic in set(GROUPS.values()))
        unpublished = (await self._relay.reader.lag()).unpublished
        say(f"   {committed} events were committed, {unpublished} of them not yet published;")
        say(f"   {await self._in_hand()} were in the worker's hands. Both are started again")
        self._party.start("ocr", "relay")

    async def _ocr_is_in_the_middle(self) -> bool:
        done = len(self._books.done("worker_group"))
        return done > self._cases or (done > self._cases // 2 and await self._in_hand() > 0)

    async def _in_hand(self) -> int:
        """What the OCR worker was handed and has not acknowledged."""
        backlogs = [await broker.backlog(WORKERS, shard) for shard in range(broker.shards)]
        groups = [group for each in backlogs for group in each.groups]
        return sum(group.pending for group in groups if group.group == "worker_group")

    async def _look_at_what_waits(self) -> None:
        await self._until(self._all_but_one_case_are_done)
        say("3. One scan cannot be read. Its case waits, and no other")
        await semel("parked", "list")
        say(f"   {self._cases - len(self._books.unread())} of {self._cases} cases have been read")

    async def _all_but_one_case_are_done(self) -> bool:
        parked = await self._spoilt_sequence()
        return parked is not None and self._books.missing() <= 1 + parked.behind

    async def _spoilt_sequence(self) -> ParkedSequence | None:
        for each in await self._parked.list(consumer="worker_group", state="parked"):
            if each.head.message.aggregate_id == self._spoilt:
                return each
        return None

    async def _settle(self) -> None:
        say("4. Somebody scans it again, corrects the message, and lets the case go on")
        parked = await self._spoilt_sequence()
        assert parked is not None
        sequence = parked.sequence.hex()[:12]
        payload = json.dumps({**parked.head.message.data, "scan": "a lease, once more"})
        await semel("parked", "edit", sequence, "--payload", payload, "--note", "scanned again")
        await semel("parked", "replay", sequence)
        await self._until(self._all_is_done)

    async def _all_is_done(self) -> bool:
        return self._books.missing() <= 0

    def _count(self, taken_back: int) -> bool:
        say("5. What has come of it")
        good = True
        for group in GROUPS:
            events, effects, wrong = self._books.compare(group)
            good = good and events > 0 and not wrong
            told = ", ".join(wrong) or "each once, each case in order"
            say(f"   {group:<16} {events:>5} events, {effects:>5} effects: {told}")
        mistakes = self._books.mistakes()
        heard = "" if mistakes else ", and nobody has heard of them"
        say(f"   {taken_back} transactions were rolled back{heard}")
        for mistake in mistakes:
            say(f"   {mistake}")
        return good and not mistakes

    async def _until(
        self, condition: Callable[[], Awaitable[bool]], *, look_s: float = 0.1
    ) -> None:
        until = time.monotonic() + WITHIN_S
        while not await condition():
            self._party.check()
            if time.monotonic() > until:
                raise TimeoutError(f"{self._books.missing()} effects have not come")
            await asyncio.sleep(look_s)


def say(text: str = "") -> None:
    print(text, flush=True)
