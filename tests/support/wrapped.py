"""A store around a real one that counts, delays, fails or loses replies on command.

The store inside is real: an operation either reaches it or it does not. What is made up is the
line between it and the guard.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from semel.errors import StoreUnavailableError

HOT = ("claim", "complete", "release", "renew", "note")


class Line:
    """The wire: `lose_request`, `lose_reply` and `delay` map a verb to how often, or how long.

    `last_words` is what every verb is answered from the moment it is set.
    """

    def __init__(self):
        self.count = Counter()
        self.lose_request = Counter()
        self.lose_reply = Counter()
        self.delay_before = {}
        self.delay_after = {}
        self.last_words = None

    async def carry(self, verb, call):
        self.count[verb] += 1
        if self.last_words is not None:
            raise self.last_words
        if verb in self.delay_before:
            await asyncio.sleep(self.delay_before[verb])
        if self.lose_request[verb] > 0:
            self.lose_request[verb] -= 1
            raise StoreUnavailableError(f"{verb}: request lost")
        answer = await call()
        if verb in self.delay_after:
            await asyncio.sleep(self.delay_after[verb])
        if self.lose_reply[verb] > 0:
            self.lose_reply[verb] -= 1
            raise StoreUnavailableError(f"{verb}: reply lost")
        return answer


class WrappedLedger:
    def __init__(self, ledger, line):
        self._ledger = ledger
        self._line = line

    def __getattr__(self, verb):
        inner = getattr(self._ledger, verb)
        if verb not in HOT:
            return inner

        async def carried(*args, **kwargs):
            return await self._line.carry(verb, lambda: inner(*args, **kwargs))

        return carried


class WrappedStore:
    def __init__(self, store):
        self.store = store
        self.line = Line()
        self._ledgers = {}

    def ledger(self, colour):
        if colour.name not in self._ledgers:
            self._ledgers[colour.name] = WrappedLedger(self.store.ledger(colour), self.line)
        return self._ledgers[colour.name]

    def close(self):
        self.store.close()

    async def aclose(self):
        await self.store.aclose()
