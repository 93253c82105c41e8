"""How often a client goes to the server and back."""

from __future__ import annotations

from typing import Any

from support.proxy import Fate, Link, Proxy


class Counting(Proxy):
    """Counts what is asked: a client that waits for each answer asks once per round trip."""

    asked = 0

    def _judge_request(self, link: Link, chunk: bytes) -> Fate:
        self.asked += 1
        return super()._judge_request(link, chunk)

    async def price(self, work: Any) -> tuple[int, Any]:
        before = self.asked
        answer = await work
        return self.asked - before, answer
