"""The database and the broker, by URL: two SQLite files here, unless the environment says other.

CASES_DATABASE   cases, outbox and inboxes: sqlite:///cases.db or postgresql://...
CASES_BROKER     the streams: sqlite:///broker.db or redis://...
CASES_LEASE_S    how long others wait for a relay or a worker that has died
"""

from __future__ import annotations

import os

import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker
from tables import Base

from semel.brokers import connect
from semel.stores.sql import init

DATABASE = os.environ.get("CASES_DATABASE", "sqlite:///cases.db")
BROKER = os.environ.get("CASES_BROKER", "sqlite:///broker.db")
LEASE_S = float(os.environ.get("CASES_LEASE_S", "10"))

DRIVERS = {"sqlite": "sqlite+pysqlite", "postgresql": "postgresql+psycopg"}

# --- streams
EVENTS = "axiom:events"
WATCHES = "axiom:watches"
WORKERS = "axiom:workers"

GROUPS = {
    "vision_group": EVENTS,
    "synapse_group": EVENTS,
    "watch_cep_group": WATCHES,
    "worker_group": WORKERS,
}

url = sa.make_url(DATABASE)
# SQLite has one writer at a time: whoever comes meanwhile waits.
patience = {"timeout": 30} if url.get_backend_name() == "sqlite" else {}
engine = sa.create_engine(
    url.set(drivername=DRIVERS[url.get_backend_name()]), connect_args=patience
)
sessions = sessionmaker(engine, expire_on_commit=False)
broker = connect(BROKER)


async def prepare() -> None:
    """Make what has to be there before the first event is."""
    init(DATABASE)  # outbox, inbox and ledger; a deployment runs `semel db init` instead
    Base.metadata.create_all(engine)
    for group, topic in GROUPS.items():
        await broker.join(topic, group)  # from now on, nothing is trimmed that it has not read


async def close() -> None:
    await broker.aclose()
    engine.dispose()
