"""A process that charges inside its own transaction, and can be killed at a named point.

    python -m support.bound_holder URL --at POINT [--then fail] [--wait]

The effect is a row in the table `charge`; the outcome goes into the same transaction. Points:
`after-claim`, `after-rows`, `before-complete`, `after-complete`, `before-commit` (the session is
about to send it), `after-commit`; and, when the block fails, `before-rollback`, `after-rollback`
(its rows are gone, its claim is not) and `after-release`. With `--wait` the process says "ready"
before it commits, and goes on when its stdin is closed.
"""

from __future__ import annotations

import argparse
import sys

import sqlalchemy as sa
from sqlalchemy.orm import Session

import semel
from semel.stores.sql import SQLStore
from semel.stores.sql.lines import parse, with_driver
from support.holder import Trap, TrappedStore


def charge(session, store, trap, options):
    bound = TrappedStore(store.bind(session), trap)
    with session.begin(), semel.once("order-1", store=bound, lease=options.lease, ttl=600) as done:
        # The claim has a connection of its own; the session has written nothing yet.
        trap.at("after-claim")
        session.execute(sa.text("INSERT INTO charge VALUES (40)"))
        session.flush()
        trap.at("after-rows")
        if options.then == "fail":
            raise LookupError("declined")
        done.done("charged")
    trap.at("after-commit")


def wait_for_the_word():
    print("ready", flush=True)
    sys.stdin.read()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--at", default=None)
    parser.add_argument("--then", default="return")
    parser.add_argument("--lease", type=float, default=0.5)
    parser.add_argument("--wait", action="store_true")
    options = parser.parse_args()
    trap = Trap(options.at, "kill")
    store = SQLStore(options.url)
    engine = sa.create_engine(with_driver(parse(options.url), "sync"))
    sa.event.listen(engine, "commit", lambda _: trap.at("before-commit"))
    sa.event.listen(engine, "rollback", lambda _: trap.at("before-rollback"))
    sa.event.listen(Session, "after_rollback", lambda _: trap.at("after-rollback"))
    if options.wait:
        sa.event.listen(engine, "commit", lambda _: wait_for_the_word())
    try:
        with Session(engine) as session:
            charge(session, store, trap, options)
        print("result charged", flush=True)
    except (semel.SemelError, LookupError, sa.exc.SQLAlchemyError) as error:
        print(f"error {type(error).__name__}", flush=True)


if __name__ == "__main__":
    main()
