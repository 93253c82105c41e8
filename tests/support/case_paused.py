"""The example `case_outbox` with a place where its OCR worker stops, to be killed there.

python -m support.case_paused stop PLACE FILE   a case is worked on; OCR stops, makes the file
python -m support.case_paused finish            relay and OCR run until all is read and told
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import consumers
import pieces
from books import Books
from office import Office
from sqlalchemy import event, orm
from tables import Reading

from semel.relay import Relay

FOR_GOOD_S = 3600
CASE = "case-1"


async def stop(place, file):
    def pause(session):
        if "read" in session.info:
            Path(file).touch()
            time.sleep(FOR_GOOD_S)

    def mark(session, _context):
        if any(isinstance(row, Reading) for row in session.new):
            session.info["read"] = True

    event.listen(orm.Session, "after_flush", mark)
    event.listen(orm.Session, place, pause)
    await pieces.prepare()
    Office(seed=0, pause_s=0).work_on(CASE)
    await finish()


async def finish():
    relay = Relay(pieces.DATABASE, pieces.broker, lease_s=pieces.LEASE_S)
    parts = relay, consumers.ocr
    running = [asyncio.create_task(part.run()) for part in parts]
    while not await is_finished(relay):
        await asyncio.sleep(0.02)
    for part in parts:
        part.stop()
    await asyncio.gather(*running)


async def is_finished(relay):
    books = Books(CASE)
    done, asked = books.done("worker_group"), books.committed(pieces.WORKERS)
    return len(done) >= len(asked) and (await relay.reader.lag()).unpublished == 0


asyncio.run({"stop": stop, "finish": finish}[sys.argv[1]](*sys.argv[2:]))
