"""`make example NAME=case_outbox`: cases, their events, and four services that live on them.

make example NAME=case_outbox                         until Ctrl-C, on SQLite, in build/case_outbox
make example NAME=case_outbox ARGS="--database postgresql://... --broker redis://..."
make example NAME=case_outbox ARGS=try                watch it being killed; ends by itself
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

HINT = """
  A relay, four workers and an office that opens cases, all in this process.
  Rows are in     {database}
  and streams in  {broker}

  In another terminal: how far is the relay, and whose case waits because of a scan that nobody
  can read? Give that message another scan, and have the case go on.

    export SEMEL_URL={database}
    {semel} outbox status
    {semel} parked list
    {semel} parked show SEQUENCE
    {semel} parked edit SEQUENCE --payload '{{"document": "...", "scan": "a lease"}}'
    {semel} parked replay SEQUENCE

  Ctrl-C ends it. `make example NAME=case_outbox ARGS=try` shows what happens when it is killed.
"""

PACE_S = 0.2
SHOW_EVERY_S = 0.5

# One case in so many has a scan that nobody can read, the fourth one to begin with.
UNREADABLE_EVERY = 100
FIRST_UNREADABLE = 4


# In the story, the ninth case has that scan.
CASES = 200
FEWEST_CASES = 10


def main() -> None:
    args = arguments()
    from semel.errors import SemelError

    try:
        if args.what == "try":
            try_it(args)
        else:
            folder = Path("build", "case_outbox").absolute()
            folder.mkdir(parents=True, exist_ok=True)
            place(args, folder)
            asyncio.run(run())
    except SemelError as error:
        sys.exit(" ".join(str(error).split()))
    except KeyboardInterrupt:
        print("\nBroken off.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def try_it(args: argparse.Namespace) -> None:
    if (args.broker or "").startswith("memory:"):
        sys.exit("with try there are several processes, and none of them hears a memory:// broker")
    os.environ.setdefault("CASES_LEASE_S", "3")  # so long others wait for what was killed
    with tempfile.TemporaryDirectory(prefix="semel-cases-") as folder:
        place(args, Path(folder))
        import demo

        sys.exit(asyncio.run(demo.main(args.cases or CASES)))


def place(args: argparse.Namespace, folder: Path) -> None:
    """Say where the database and the broker are; `pieces` opens them."""
    database = args.database or f"sqlite:///{folder}/cases.db"
    check_database(database)
    os.environ["CASES_DATABASE"] = database
    os.environ["CASES_BROKER"] = args.broker or f"sqlite:///{folder}/broker.db"


def check_database(given: str) -> None:
    """Say in one sentence what would be a traceback."""
    import sqlalchemy as sa

    try:
        url = sa.make_url(given)
    except sa.exc.ArgumentError:
        sys.exit("--database is no URL of a database; write sqlite:///file or postgresql://...")
    if url.get_backend_name() not in {"sqlite", "postgresql"}:
        shown = url.render_as_string(hide_password=True)
        sys.exit(f"this example runs on SQLite and PostgreSQL, not on {shown}")


async def run() -> None:
    """Everything in one process; `demo` has a process for each."""
    import consumers
    import screen
    from pieces import BROKER, DATABASE, broker, close, prepare

    from semel.health import Watch
    from semel.relay import Relay

    await prepare()
    print(HINT.format(database=DATABASE, broker=BROKER, semel=command()), flush=True)
    relay = Relay(DATABASE, broker)
    workers = [consumers.vision, consumers.synapse, consumers.watch, consumers.ocr]
    parts = [relay, *workers]
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    running = [asyncio.create_task(part.run()) for part in parts]
    working = asyncio.create_task(work(stopped))
    told = Watch(relay)
    with screen.opened() as shown:
        while not stopped.is_set() and not any(task.done() for task in (working, *running)):
            shown.show(await told.report(), [worker.status() for worker in workers])
            await pause(stopped, SHOW_EVERY_S)
    stopped.set()
    for part in parts:
        part.stop()
    await asyncio.gather(working, *running)
    await told.close()
    await consumers.inbox.aclose()
    await close()


async def work(stopped: asyncio.Event) -> None:
    from office import UNREADABLE, Office

    office, began = Office(seed=0, pause_s=PACE_S / 4), int(time.time())
    number = 0
    while not stopped.is_set():
        number += 1
        scan = UNREADABLE if number % UNREADABLE_EVERY == FIRST_UNREADABLE else "a lease"
        await asyncio.to_thread(office.work_on, f"{began}-{number}", scan=scan)
        await pause(stopped, PACE_S / 4)


async def pause(stopped: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stopped.wait()
    except TimeoutError:
        pass


def command() -> str:
    """`semel`, as it can be typed here."""
    beside = Path(sys.executable).with_name("semel")
    return os.path.relpath(beside) if beside.exists() else "semel"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="case_outbox",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", choices=("run", "try"), default="run")
    parser.add_argument("--database", help="PostgreSQL; without it, SQLite in build/case_outbox")
    parser.add_argument("--broker", help="redis://...; without it, SQLite in build/case_outbox")
    parser.add_argument("--cases", type=int, help=f"with try: so many, by four people; {CASES}")
    args = parser.parse_args()
    if args.cases is not None and args.what != "try":
        parser.error("--cases goes with try; without it people work until Ctrl-C")
    if args.cases is not None and args.cases < FEWEST_CASES:
        parser.error(f"--cases {args.cases} are too few for the story; at least {FEWEST_CASES}")
    return args


if __name__ == "__main__":
    main()
