"""The example `orders_api` with a place where it stops, once, so that it can be killed there.

`PAUSE_AT` names the place, `PAUSED` the file that says it was reached. After that it goes on.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import shop
from sqlalchemy import event, orm
from tables import Order

AT, REACHED = os.environ["PAUSE_AT"], Path(os.environ["PAUSED"])
FOR_GOOD_S = 3600

charge, add = shop.bank.charge, shop.outbox.add


def pause(place):
    if place == AT and not REACHED.exists():
        REACHED.touch()
        time.sleep(FOR_GOOD_S)


async def paused_charge(*args, **kwargs):
    pause("before the payment")
    receipt = await charge(*args, **kwargs)
    pause("while the bank answers")
    return receipt


def paused_add(*args):
    pause("after the receipt is recorded")
    return add(*args)


def mark(session, _context):
    if any(isinstance(row, Order) for row in session.new):
        session.info["order"] = True


def paused_commit(place):
    def heard(session):
        if "order" in session.info:
            pause(place)

    return heard


shop.bank.charge = paused_charge
shop.outbox.add = paused_add
event.listen(orm.Session, "after_flush", mark)
event.listen(orm.Session, "before_commit", paused_commit("before the commit"))
event.listen(orm.Session, "after_commit", paused_commit("after the commit"))

app = shop.app
