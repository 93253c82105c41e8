"""The example `scan_pipeline` as a process of ours: fast, and with workers that die often."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from support.process import HOST, ServerProcess, free_port, new_folder
from support.web import Python

EXAMPLE = Path(__file__).parents[2] / "examples" / "scan_pipeline"

# How long a scan waits for a worker that has died. A worker that is slow to be scheduled must not
# lose its scan: that would be right, but would take as long.
LEASE_S = 1.0
PACE_S = 0.03


@dataclass
class Pipeline(ServerProcess):
    """The page's server; gateway, router and workers are its children."""

    gateway_port: int = field(kw_only=True)

    @property
    def url(self):
        return f"http://{HOST}:{self.port}"

    @property
    def gateway_url(self):
        return f"http://{HOST}:{self.gateway_port}"

    def probe(self):
        assert self.tally()["workers"]
        # Somebody who has not been there yet is there as well.
        assert httpx.get(f"{self.gateway_url}/nobody", timeout=5).status_code == 404

    def tally(self):
        return httpx.get(f"{self.url}/tally", timeout=5).raise_for_status().json()

    def scan(self, id, picture="bottle"):
        return httpx.put(f"{self.url}/scans/{id}", json={"picture": picture}, timeout=30)

    def kill_gateway(self):
        """False when it is not there just now."""
        return httpx.delete(f"{self.url}/gateway", timeout=5).is_success

    def kill_worker(self, name):
        return httpx.delete(f"{self.url}/workers/{name}", timeout=5).is_success


def start_pipeline(*options, url=None, feed_url=None, crash=0.0, pace_s=PACE_S, gateway_port=None):
    folder, port, gateway_port = new_folder("scans"), free_port(), gateway_port or free_port()
    url = url or f"sqlite:///{folder}/scans.db"
    variables = {"SCAN_LEASE_S": LEASE_S, "SCAN_PACE_S": pace_s, "SCAN_RETRY_MS": 50}
    words = [
        *(str(EXAMPLE), "--url", url, "--crash", str(crash), "--workers", "2"),
        *("--port", str(port), "--gateway-port", str(gateway_port)),
        *(("--feed-url", feed_url) if feed_url else ()),
        *options,
    ]
    python = Python(
        "scan_pipeline",
        Path(sys.executable),
        "venv",
        tuple((name, str(given)) for name, given in variables.items()),
    )
    return Pipeline(python, words, port, folder, gateway_port=gateway_port).start()
