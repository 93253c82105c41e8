"""`make example NAME=orders_api`: the orders API on 127.0.0.1, and what to type to try it.

make example NAME=orders_api                                  on SQLite, in build/orders_api
make example NAME=orders_api ARGS="--url postgresql://..."    on PostgreSQL
make example NAME=orders_api ARGS="--port 8001"               when 8000 is taken
make example NAME=orders_api ARGS=try                         watch it being retried and killed
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlalchemy as sa

HERE = Path(__file__).parent

HINT = """
  The orders API is at {url} (its documentation: {url}/docs)
  Its rows are in {database}

  Order something; send the same again, and again:

    curl -i {url}/orders -H 'X-API-Key: key-of-ann' -H 'Content-Type: application/json' \\
      -H 'Idempotency-Key: "order-1"' -d '{{"item": "book", "cents": 4000, "card": "visa-1"}}'

  The same key for something else, without a key, with an unknown API key, with no money:

    curl -i {url}/orders -H 'X-API-Key: key-of-ann' -H 'Content-Type: application/json' \\
      -H 'Idempotency-Key: "order-1"' -d '{{"item": "pen", "cents": 100, "card": "visa-1"}}'
    curl -i {url}/orders -H 'X-API-Key: key-of-ann' -H 'Content-Type: application/json' \\
      -d '{{"item": "pen", "cents": 100, "card": "visa-1"}}'
    curl -i {url}/orders -H 'X-API-Key: key-of-eve' -H 'Content-Type: application/json' \\
      -H 'Idempotency-Key: "order-1"' -d '{{"item": "book", "cents": 4000, "card": "visa-1"}}'
    curl -i {url}/orders -H 'X-API-Key: key-of-ann' -H 'Content-Type: application/json' \\
      -H 'Idempotency-Key: "order-2"' -d '{{"item": "car", "cents": 900000, "card": "empty"}}'

  What there is:

    curl -s {url}/orders -H 'X-API-Key: key-of-ann'

  What the ledger knows of it:

    {python} -m semel ledger list {database}

  Ctrl-C ends it. `make example NAME=orders_api ARGS=try` shows what happens when it is killed.
"""


def main() -> None:
    args = arguments()
    if args.what == "try":
        import demo

        sys.exit(demo.main())
    folder = Path("build", "orders_api").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    default = args.url or f"sqlite:///{folder}/orders.db"
    os.environ.setdefault("ORDERS_URL", default)
    os.environ.setdefault("BANK_URL", args.url or f"sqlite:///{folder}/bank.db")
    for name in ("ORDERS_URL", "BANK_URL"):
        check_database(name, os.environ[name])
    check_port(args.port)
    import sqlalchemy as sa
    import uvicorn

    shown = pasteable(sa.make_url(os.environ["ORDERS_URL"]))
    url = f"http://127.0.0.1:{args.port}"
    python = shlex.quote(sys.executable)
    print(HINT.format(url=url, database=shlex.quote(shown), python=python), flush=True)
    uvicorn.run("shop:app", host="127.0.0.1", port=args.port, app_dir=str(HERE))


def pasteable(url: sa.URL) -> str:
    """For `semel`: on its command line, `sqlite:` alone is a file of SQLiteStore."""
    if url.get_backend_name() == "sqlite":
        url = url.set(drivername="sqlite+pysqlite")
    return url.render_as_string(hide_password=True)


def check_database(name: str, given: str) -> None:
    """Say in one sentence what a server would say in a traceback."""
    import sqlalchemy as sa

    try:
        url = sa.make_url(given)
    except sa.exc.ArgumentError:
        sys.exit(f"{name} is no URL of a database; write sqlite:///file or postgresql://...")
    if url.get_backend_name() == "sqlite":
        return
    shown = url.render_as_string(hide_password=True)
    if url.get_backend_name() != "postgresql":
        sys.exit(f"this example runs on SQLite and PostgreSQL, not on {shown}")
    engine = sa.create_engine(
        url.set(drivername="postgresql+psycopg"), connect_args={"connect_timeout": 5}
    )
    try:
        engine.connect().close()
    except sa.exc.OperationalError as error:
        sys.exit(f"{shown} cannot be reached: {str(error.orig).splitlines()[0]}")
    engine.dispose()


def check_port(port: int) -> None:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        sys.exit(f"port {port} is not free ({error.strerror}); choose another with --port")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="orders_api",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", choices=("serve", "try"), default="serve")
    parser.add_argument("--url", help="a PostgreSQL URL; without it, SQLite in build/orders_api")
    parser.add_argument("--port", type=int, default=8000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
