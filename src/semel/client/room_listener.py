"""What a loop over a table's news has not heard yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from semel.client.room_rules import Guest
from semel.client.room_values import News, State


class Listener:
    """Begins with how things stand. Of states that follow one another it keeps the last alone."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._news: deque[News | None] = deque()
        self._woken = asyncio.Event()
        version = guest.version
        if version is not None:
            viewer, pending = guest.viewer, guest.pending
            self._news.append(State(guest.state, guest.confirmed, version, viewer, pending))
        if guest.over is not None:
            self._news.append(None)

    def tell(self, news: News | None) -> None:
        last = self._news[-1] if self._news else None
        if isinstance(last, State) and isinstance(news, State):
            self._news.pop()
        self._news.append(news)
        self._woken.set()

    async def news(self) -> AsyncIterator[News]:
        while True:
            while self._news:
                news = self._news.popleft()
                if news is None:
                    self._raise()
                    return
                yield news
            self._woken.clear()
            await self._woken.wait()

    def _raise(self) -> None:
        over = self._guest.over
        if over is not None and over.error is not None:
            raise over.error
