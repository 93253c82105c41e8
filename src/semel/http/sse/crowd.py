"""All viewers of a gateway, looked after in one round a second.

A round costs one look at each, so that ten thousand who wait need no ten thousand timers.
"""

from __future__ import annotations

import asyncio
import random

from semel.colour import ASYNC
from semel.http.asgi import Receive
from semel.http.sse.limits import Limits
from semel.http.sse.viewer import Viewer

__all__ = ["Crowd"]

# How often it is looked who is due, and who is too slow.
ROUND_S = 1.0

# The part of a drain in which connections are closed one after another; the rest is for those that
# do not take their last bytes.
SPREAD = 0.8
STEP_S = 0.05

# Those who were cut off need a moment to be gone; whoever does not go by then is not waited for.
LEFT_S = 1.0


class Crowd:
    """Viewers, while they are here, on one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._viewers: dict[Viewer, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def watch(self, viewer: Viewer, receive: Receive, retry_ms: int) -> None:
        """From its first frame to its last."""
        if self._is_closed:  # since it was let in
            viewer.close("drained")
        self._viewers[viewer] = None
        if self._timer is None:
            self._begin_round()
        try:
            await viewer.run(receive, retry_ms)
        finally:
            self._viewers.pop(viewer, None)

    def _begin_round(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(ROUND_S, self._round)

    def _round(self) -> None:
        now = ASYNC.now()
        for viewer in tuple(self._viewers):
            viewer.look(self._limits, now)
        self._timer = None
        if self._viewers:
            self._begin_round()

    async def drain(self, within_s: float) -> None:
        """Close them all, not all at once; those who are left when the time is up are cut off."""
        self._is_closed = True
        ends_at = ASYNC.now() + within_s
        crowd = list(self._viewers)
        random.shuffle(crowd)
        steps = max(1, int(within_s * SPREAD / STEP_S))
        for step in range(steps):
            begin, end = (-(-len(crowd) * n // steps) for n in (step, step + 1))  # rounded up
            for viewer in crowd[begin:end]:
                viewer.close("drained")
            if not self._viewers:
                break
            await ASYNC.sleep(STEP_S)
        while self._viewers and ASYNC.now() < ends_at:
            await ASYNC.sleep(min(STEP_S, max(0.0, ends_at - ASYNC.now())))
        for viewer in tuple(self._viewers):
            viewer.drop("drained")
        while self._viewers and ASYNC.now() < ends_at + LEFT_S:
            await ASYNC.sleep(STEP_S)

    def close(self) -> None:
        """Whoever is here is told to leave."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for viewer in tuple(self._viewers):
            viewer.close("drained")
