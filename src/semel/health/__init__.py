"""Is it alive, is it ready, how far behind is it: asked over HTTP by what looks after processes.

    async with serve(relay, at="127.0.0.1:8080"):
        await relay.run()

`/healthz` answers 200 while the process turns, and 503 when only a restart can help. `/readyz`
answers 200 while nothing keeps it from its work, else 503 and the reasons, as JSON. `/metrics` is
what Prometheus reads; it needs the extra `metrics`.

The easy mistake is to have a process restarted because `/readyz` says no: when the database is
down, that brings nothing back, and what was in hand is done again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from typing import Any

from semel.errors import SettingsError
from semel.health.server import Answer, listening
from semel.health.watch import Part, Report, Watch

__all__ = ["Report", "Watch", "serve"]


@contextlib.asynccontextmanager
async def serve(*parts: Part | Watch, at: str) -> AsyncIterator[str]:
    """Answer for these parts at `HOST:PORT` while the block runs; gives the URL."""
    watches = [part if isinstance(part, Watch) else Watch(part) for part in parts]
    titles = [watch.title for watch in watches]
    for twin in {title for title in titles if titles.count(title) > 1}:
        raise SettingsError(
            f"two parts are called {twin}, and their metrics would have the same labels; serve "
            "each at an address of its own"
        )
    routes = _Routes(watches)
    async with listening(
        at, {"/healthz": routes.healthz, "/readyz": routes.readyz, "/metrics": routes.metrics}
    ) as url:
        try:
            yield url
        finally:
            await asyncio.gather(*(watch.close() for watch in watches))


class _Routes:
    def __init__(self, watches: Sequence[Watch]) -> None:
        self._watches = watches

    async def healthz(self) -> Answer:
        stuck = [watch for watch in self._watches if not watch.status().turning]
        if stuck:
            names = ", ".join(watch.title for watch in stuck)
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{names}: does not turn\n".encode())
        return Answer(HTTPStatus.OK, b"ok\n")

    async def readyz(self) -> Answer:
        reports = await self._reports()
        why = [reason for report in reports for reason in report.why]
        status = HTTPStatus.SERVICE_UNAVAILABLE if why else HTTPStatus.OK
        said: dict[str, Any] = {"ready": not why, "why": why}
        said["parts"] = [report.as_json() for report in reports]
        body = json.dumps(said, indent=2) + "\n"
        return Answer(status, body.encode(), "application/json")

    async def metrics(self) -> Answer:
        try:
            from semel.health.metrics import TYPE, written
        except ModuleNotFoundError as missing:
            if missing.name != "prometheus_client":
                raise
            text = "prometheus-client is not installed: pip install 'semel[metrics]'\n"
            return Answer(HTTPStatus.NOT_IMPLEMENTED, text.encode())
        return Answer(HTTPStatus.OK, written(await self._reports()), TYPE)

    async def _reports(self) -> Sequence[Report]:
        return await asyncio.gather(*(watch.report() for watch in self._watches))
