"""`make example NAME=scan_pipeline`: scans, workers that die, and a page that shows it live.

make example NAME=scan_pipeline                            on SQLite, in build/scan_pipeline
make example NAME=scan_pipeline ARGS="--url redis://..."   on Redis
make example NAME=scan_pipeline ARGS="--crash 0.2"         a worker dies at every fifth event

With two Redis servers, workers write to shards of theirs, and a router carries the events over to
the gateway's:

make example NAME=scan_pipeline ARGS="--url redis://... --feed-url redis://..."
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import socket
import sys
from pathlib import Path

HERE = Path(__file__).parent
HOST = "127.0.0.1"

MOST_CRASH = 0.5

HINT = """
  The page is at     {page}
  and the gateway at {gateway}
  Scans are in       {url}

  Start some scans. Workers die at random, and others take over. Kill more of them there, or the
  gateway, or reload: the page goes on where it was. The same in a terminal, by the scan's name:

    {semel} tail {gateway} NAME

  Ctrl-C ends it.
"""


def main() -> None:
    args = arguments()
    place(args)
    for port in (args.port, args.gateway_port):
        check_port(port)
    from semel.errors import SemelError

    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(run(args))
    except SemelError as error:
        sys.exit(" ".join(str(error).split()))


def place(args: argparse.Namespace) -> None:
    """Say where everything is; `pieces` reads it, in every process."""
    if args.feed_url and not args.url:
        sys.exit("--feed-url goes with --url: workers on one Redis, and the gateway on another")
    url = args.url or f"sqlite:///{folder()}/scans.db"
    for each in (url, args.feed_url or url):
        if each.startswith("memory:"):
            sys.exit("there are several processes, and none of them sees another's memory://")
    os.environ["SCAN_URL"] = url
    os.environ["SCAN_FEED_URL"] = args.feed_url or url
    if args.crash is not None:
        os.environ["SCAN_CRASH"] = str(args.crash)


def folder() -> Path:
    made = Path("build", "scan_pipeline").absolute()
    made.mkdir(parents=True, exist_ok=True)
    return made


async def run(args: argparse.Namespace) -> None:
    import uvicorn
    from crew import Crew
    from pieces import DOMAIN, FEED_URL, LEASE_S, SHARDS, URL, check
    from web import make_app

    await check()
    gateway = args.public_gateway or f"http://{HOST}:{args.gateway_port}"
    os.environ["SCAN_ORIGIN"] = page = f"http://{HOST}:{args.port}"
    others = {
        "gateway": (str(HERE / "gateway.py"), str(args.gateway_port)),
    }
    if FEED_URL != URL:
        words = ("--domain", DOMAIN, "--shards", str(SHARDS), "--lease", f"{LEASE_S:g}s", "--quiet")
        others["router"] = ("-m", "semel", "router", URL, FEED_URL, *words)
    app = make_app(Crew(args.workers, **others), gateway)
    url = re.sub(r"://[^/]*@", "://***@", URL)
    print(HINT.format(page=page, gateway=gateway, url=url, semel=command()), flush=True)
    config = uvicorn.Config(app, host=HOST, port=args.port, log_level="warning")
    await uvicorn.Server(config).serve()


def check_port(port: int) -> None:
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        sys.exit(f"port {port} is not free ({error.strerror}); choose with --port, --gateway-port")


def command() -> str:
    """`semel`, as it can be typed here."""
    beside = Path(sys.executable).with_name("semel")
    return os.path.relpath(beside) if beside.exists() else "semel"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scan_pipeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", help="redis://...; without it, SQLite in build/scan_pipeline")
    parser.add_argument("--feed-url", help="the gateway's Redis, if it is not the workers'")
    parser.add_argument("--workers", type=int, default=3, metavar="N")
    parser.add_argument("--crash", type=float, metavar="P", help="of a worker, at each event; 0.04")
    parser.add_argument("--port", type=int, default=8000, help="of the page")
    parser.add_argument("--gateway-port", type=int, default=8001)
    parser.add_argument("--public-gateway", metavar="URL", help="where browsers find the gateway")
    args = parser.parse_args()
    if args.crash is not None and not 0 <= args.crash <= MOST_CRASH:
        parser.error(f"--crash {args.crash}: 0 to {MOST_CRASH}, or nobody gets anywhere")
    if args.workers < 1:
        parser.error(f"--workers {args.workers}: at least one")
    return args


if __name__ == "__main__":
    main()
