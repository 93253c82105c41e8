"""A real Prometheus that reads the metrics of one process, much more often than usual."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from support import binaries
from support.process import HOST, ServerProcess, free_port, new_folder

# Often enough for windows of two seconds; a reading that fails on a busy machine is not missed.
EVERY = "200ms"


class Prometheus(ServerProcess):
    """Answers what it has made of the metrics."""

    def probe(self) -> None:
        assert httpx.get(f"{self.url}/-/ready", timeout=5).status_code == httpx.codes.OK

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def alerts(self) -> dict[str, dict[str, Any]]:
        """Those that fire or are about to, by name."""
        told = await self._get("alerts")
        return {alert["labels"]["alertname"]: alert for alert in told["alerts"]}

    async def values(self, expression: str) -> list[float]:
        told = await self._get("query", query=expression)
        return [float(each["value"][1]) for each in told["result"]]

    async def _get(self, path: str, **asked: str) -> Any:
        async with httpx.AsyncClient(timeout=20) as client:
            answer = await client.get(f"{self.url}/api/v1/{path}", params=asked)
        return answer.raise_for_status().json()["data"]


@contextmanager
def watching(url: str, rules: str) -> Iterator[Prometheus]:
    """A Prometheus that looks at what is served at `url`."""
    program = binaries.prometheus(binaries.find("promtool"))
    folder, port = new_folder("prometheus"), free_port()
    (folder / "rules.yml").write_text(rules)
    (folder / "prometheus.yml").write_text(json.dumps(_settings(url)))  # what is JSON is YAML
    words = [
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={HOST}:{port}",
    ]
    server = Prometheus(program, words, port, folder)
    try:
        yield server.start()
    finally:
        server.stop()


def _settings(url: str) -> dict[str, Any]:
    targets = [{"targets": [url.removeprefix("http://")]}]
    return {
        "global": {"scrape_interval": EVERY, "scrape_timeout": EVERY, "evaluation_interval": EVERY},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "game", "static_configs": targets}],
    }
