"""Where everything is, by the environment; every process of the example reads it.

SCAN_URL           what workers write: sqlite:///scans.db or redis://...
SCAN_FEED_URL      what the gateway reads: the same, or another Redis; then a router is in between
SCAN_LEASE_S       how long a scan waits for a worker that has died
SCAN_PACE_S        how long a worker thinks between two events
SCAN_CRASH         how likely a worker dies at an event, 0 to 1
"""

from __future__ import annotations

import os

from semel.bus import Publisher
from semel.colour import ASYNC
from semel.ports import LogStore
from semel.settings import as_log_store as opened

URL = os.environ.get("SCAN_URL", "sqlite:///scans.db")
FEED_URL = os.environ.get("SCAN_FEED_URL", URL)
LEASE_S = float(os.environ.get("SCAN_LEASE_S", "2"))
PACE_S = float(os.environ.get("SCAN_PACE_S", "0.3"))
CRASH = float(os.environ.get("SCAN_CRASH", "0.04"))

DOMAIN = "scan"
SHARDS = 4


def publisher(store: LogStore) -> Publisher:
    """Straight to the job's stream where the gateway reads the same store, else to a router."""
    return Publisher(store, domain=DOMAIN, shards=None if FEED_URL == URL else SHARDS)


async def check() -> None:
    """Say what cannot be reached before anything is started."""
    for url in dict.fromkeys((URL, FEED_URL)):
        store = opened(url)
        try:
            await store.log(ASYNC).heads(["scan:tray"])
        finally:
            await store.aclose()
