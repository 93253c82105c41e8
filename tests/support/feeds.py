"""A log whose bell can be deaf, that can be down, that can lose its tail, and that counts."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
from collections import Counter

from semel.colour import ASYNC
from semel.entries import Keep
from semel.errors import CorruptRecordError, DamagedStoreError, StoreUnavailableError
from semel.stores import MemoryStore
from semel.testing.simulator import SimClock, SimLoop

STREAM = "scan:job:7"


class ShakyStore:
    """A store in memory, and what can go wrong with it."""

    def __init__(self, clock=None):
        self.inner = MemoryStore(clock=clock)
        self.asked = Counter()
        self.is_down = False
        self.is_deaf = False
        self.is_mute = False
        self.corrupt = ""  # this stream
        self.is_damaged = False  # where the entries are
        self.delay_s = 0.0
        self.listen_s = 0.0

    def ledger(self, colour):
        return self.inner.ledger(colour)

    def log(self, colour):
        return _ShakyLog(self, self.inner.log(colour))

    def bell(self):
        return _ShakyBell(self, self.inner.bell())

    def close(self):
        pass

    async def aclose(self):
        pass

    # --- what a test does -----------------------------------------------------------------------

    async def append(self, text, stream=STREAM, *, ends=False, id=None, **how):
        return await self.inner.log(ASYNC).append(
            stream, text.encode(), id=id or text, ends=ends, **how
        )

    async def fill(self, numbers, stream=STREAM, **how):
        for n in numbers:
            await self.append(str(n), stream, **how)

    async def trim(self, upto, stream=STREAM):
        await self.inner.log(ASYNC).trim(stream, upto)

    def copied(self):
        """What a replica has by now."""
        return copy.deepcopy(self.inner._log._streams)

    def fail_over(self, copied):
        """That replica is the log from now on."""
        self.inner._log._streams = copied


class _ShakyLog:
    def __init__(self, store, inner):
        self._store = store
        self._inner = inner
        self.append = inner.append

    def __getattr__(self, verb):
        async def asked(*words):
            self._store.asked[verb] += 1
            await asyncio.sleep(self._store.delay_s)
            if self._store.is_down:
                raise StoreUnavailableError("the store is down")
            if self._store.is_damaged and verb == "read":
                raise DamagedStoreError("the store is damaged")
            if self._store.corrupt and words[0] == self._store.corrupt:
                raise CorruptRecordError(f"the stream {words[0]!r} cannot be read")
            return await getattr(self._inner, verb)(*words)

        return asked


class _ShakyBell:
    def __init__(self, store, inner):
        self._store = store
        self._inner = inner
        self._wakes = {}
        self.leave_now = inner.leave

    async def listen(self, stream, wake):
        def heard():
            if not self._store.is_deaf:
                wake()

        self._wakes[stream, wake] = heard
        self._store.asked["listen"] += 1
        if self._store.is_mute:
            raise RuntimeError("there is no bell")
        await asyncio.sleep(self._store.listen_s)
        await self._inner.listen(stream, heard)

    async def leave(self, stream, wake):
        self._store.asked["leave"] += 1
        await self._inner.leave(stream, self._wakes.pop((stream, wake)))

    async def aclose(self):
        await self._inner.aclose()


def simulated(*seeds, budget=500_000):
    """Run a test in simulated time, once for each seed; it is given a store."""

    def decorate(test):
        @functools.wraps(test)
        def run(**fixtures):
            for seed in seeds or (1, 2, 3):
                loop = SimLoop(seed, budget=budget)
                loop.run(test(ShakyStore(SimClock(loop)), **fixtures))

        # pytest would look for a fixture called store
        wanted = inspect.signature(test)
        others = [each for name, each in wanted.parameters.items() if name != "store"]
        run.__signature__ = wanted.replace(parameters=others)
        return run

    return decorate


class Following:
    """What one who follows a stream has been told so far."""

    def __init__(self, feed, stream=STREAM, after=None):
        self.told = []
        self._task = asyncio.ensure_future(self._follow(feed, stream, after))

    async def _follow(self, feed, stream, after):
        async for news in feed.subscribe(stream, after):
            self.told.append(news)

    @property
    def over(self):
        return self._task.done()

    async def stop(self):
        self._task.cancel()
        await asyncio.wait([self._task])

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition(self):
                if self._task.done():
                    self._task.result()
                await asyncio.sleep(0.01)


KEEP_FOUR = Keep(entries=4)

__all__ = ["KEEP_FOUR", "STREAM", "Following", "ShakyStore", "simulated"]
