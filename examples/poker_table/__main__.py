"""`make example NAME=poker_table`: no-limit hold'em in the browser, on two servers that may die.

make example NAME=poker_table                                on SQLite, in build/poker_table
make example NAME=poker_table ARGS="--url redis://..."       on Redis
make example NAME=poker_table ARGS="--url postgresql://..."  on PostgreSQL, whose tables it makes
make example NAME=poker_table ARGS="--turn 60"               a minute to think
make example NAME=poker_table ARGS="--port 9000"             where 8000 is taken
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import socket
import sys
from pathlib import Path

HOST = "127.0.0.1"

HINT = """
  The table is at  {page}
  Hands are in     {url}

  Open it twice, under two names, and sit down. When there are two, the first hand is dealt after
  {show} seconds, or at once by "Deal now". Others may watch. Kill the server you are on, reload,
  cut the network, click twice: the hand goes on.

  Ctrl-C ends it. Started again, it has the table as it was left, with whoever sat there; one at
  which nobody has been is at {page}/?table=NAME, with any name{forget}.
"""

FORGET = """.
  To forget all of them, end it and remove {folder}"""


def main() -> None:
    args = arguments()
    url = args.url or f"sqlite:///{folder()}/poker.db"
    if url.startswith("memory:"):
        sys.exit("there are two servers, and none of them sees another's memory://")
    os.environ |= {"POKER_URL": url, "POKER_TURN_S": f"{args.turn:g}"}
    os.environ.setdefault("POKER_SHOW_S", "8")
    from semel.errors import SemelError

    try:
        asyncio.run(run(args, url))
    except SemelError as error:
        sys.exit(" ".join(str(error).split()))


def folder() -> Path:
    made = Path("build", "poker_table").absolute()
    made.mkdir(parents=True, exist_ok=True)
    return made


async def run(args: argparse.Namespace, url: str) -> None:
    from crew import Crew

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    with opened(args.port) as listening:
        await check(url)
        shown = re.sub(r"://[^/]*@", "://***@", url)
        page, show = f"http://{HOST}:{args.port}", os.environ["POKER_SHOW_S"]
        forget = "" if args.url else FORGET.format(folder=folder())
        print(HINT.format(page=page, url=shown, show=show, forget=forget), flush=True)
        await Crew(args.servers, listening).run(stopped)


def opened(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port), backlog=2048)
    except OSError as error:
        sys.exit(f"port {port} is not free ({error.strerror}); choose with --port")


async def check(url: str) -> None:
    """Say what cannot be reached before anything is started."""
    from semel.colour import ASYNC
    from semel.settings import as_log_store
    from semel.stores.sql import SQLStore, init

    store = as_log_store(url)
    try:
        if isinstance(store, SQLStore):
            init(url)  # a deployment runs `semel db init` instead
        await store.log(ASYNC).heads(["poker:timers"])
    finally:
        await store.aclose()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="poker_table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", help="redis:// or postgresql://; without it, SQLite in build/")
    parser.add_argument("--servers", type=int, default=2, metavar="N")
    parser.add_argument("--turn", type=float, default=30.0, metavar="S", help="seconds to think")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    if args.servers < 1:
        parser.error(f"--servers {args.servers}: at least one")
    if not args.turn > 0:
        parser.error(f"--turn {args.turn:g}: more than nothing")
    return args


if __name__ == "__main__":
    main()
