"""The processes of one party around a bus: workers, routers, gateways, to be killed at any moment.

    python -m support.bus_party        # then a line for each process that is to start:
    work URL SHARDS SEED               0 shards: there is no router
    router WORKERS GATEWAYS
    gateway URL PORT

Every worker publishes every event of every job, in each job's order, in any order of the jobs, and
all of it again when it begins anew: so it is known what each job's log must be.
"""

from __future__ import annotations

import asyncio
import json
import random

from semel.bus import BackPressureError, Publisher, Stages
from semel.cli.app import app
from semel.errors import StoreUnavailableError
from support.nursery import serve

LEASE_S = 1.0
SHARDS = 2
JOBS = [f"job-{n}" for n in range(6)]
STEPS = 60
STAGES = Stages({"work": (1, 999), "done": (1000, 1009)})
EVENTS = [*(("work", n) for n in range(1, STEPS + 1)), ("done", 1000)]


def said(job, seq):
    """What an event says: whose it is, and enough to be cut in the middle of."""
    return {"of": job, "text": f"{job} é€😀 {seq}\n" * (1 + seq % 7)}


async def work(url, shards, seed):
    chance = random.Random(seed)
    publisher = Publisher(url, shards=shards or None, stages=STAGES)
    done = dict.fromkeys(JOBS, 0)
    while left := [job for job in JOBS if done[job] < len(EVENTS)]:
        job = chance.choice(left)
        stage, seq = EVENTS[done[job]]
        try:
            is_new = await publisher.publish(job, stage, seq, said(job, seq))
        except (StoreUnavailableError, BackPressureError):
            await asyncio.sleep(0.05)
            continue
        done[job] += 1
        if is_new:
            await asyncio.sleep(chance.uniform(0, 0.04))
    await publisher.aclose()


def play(asked):
    role, *words = asked["words"].split()
    if role == "work":
        url, shards, seed = words
        asyncio.run(work(url, int(shards), int(seed)))
    elif role == "router":
        lease = ("--lease", f"{LEASE_S}s", "--shards", str(SHARDS))
        app(["router", *words, *lease, "--quiet"], standalone_mode=False)
    elif role == "gateway":
        url, port = words
        options = ("--port", port, "--drain", "1s", "--quiet", "--wait", "--heartbeat", "1s")
        app(["gateway", url, *options], standalone_mode=False)
    else:
        raise ValueError(json.dumps(asked))


if __name__ == "__main__":
    serve(play)
