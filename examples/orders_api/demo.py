"""The orders API, double-clicked, asked for something else, locked out and killed in the middle.

Everything runs in a temporary folder, on SQLite, on a free port of 127.0.0.1. The server that is
killed is the one that was started here. Exits 0 when each order was charged once.
"""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import httpx

HERE = Path(__file__).parent
ANN = {"X-API-Key": "key-of-ann"}
BOOK = {"item": "book", "cents": 4000, "card": "visa-1"}


class Shop:
    """The API in a process of its own."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._env = {
            **os.environ,
            "ORDERS_URL": f"sqlite:///{folder}/orders.db",
            "BANK_URL": f"sqlite:///{folder}/bank.db",
            "ORDERS_LEASE_S": "5",
            **env,
        }
        self._words = [
            *(sys.executable, "-m", "uvicorn", "shop:app", "--app-dir", str(HERE)),
            *("--port", str(self.port), "--log-level", "warning"),
        ]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._words, env=self._env)
        wait_until(lambda: answers(self.url))

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()

    def order(self, key: str, wanted: dict[str, object] = BOOK) -> httpx.Response:
        headers = {**ANN, "Idempotency-Key": f'"{key}"'}
        return httpx.post(f"{self.url}/orders", json=wanted, headers=headers, timeout=30)

    def order_until_answered(self, key: str) -> httpx.Response:
        """As a client should: the same key, after as long as it was told to wait."""
        while (answer := self.order(key)).status_code == httpx.codes.CONFLICT:
            say(f"   {told(answer)}, asking again")
            time.sleep(int(answer.headers["Retry-After"]))
        return answer

    def count(self, table: str) -> int:
        name = "bank.db" if table == "bank_charges" else "orders.db"
        with sqlite3.connect(self.folder / name) as rows:
            return int(rows.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

    def withdraw_permission(self) -> None:
        with sqlite3.connect(self.folder / "orders.db") as rows:
            rows.execute("UPDATE customers SET may_order = 0 WHERE tenant = 'ann'")


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/openapi.json").is_success
    except httpx.TransportError:
        return False


def wait_until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(0.05)


def say(text: str = "") -> None:
    print(text, flush=True)


def told(answer: httpx.Response) -> str:
    replayed = ", replayed" if "Idempotent-Replayed" in answer.headers else ""
    said = answer.json()
    what = said.get("type") or said.get("detail") or f"order {said['id'][:8]}"
    return f"{answer.status_code}{replayed}: {what}"


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="semel-orders-") as folder:
        shop = Shop(Path(folder), BANK_ANSWERS_AFTER_S="0.5")
        try:
            good = show(shop)
        finally:
            shop.stop()
    say()
    say("All as promised." if good else "NOT as promised.")
    return 0 if good else 1


def show(shop: Shop) -> bool:
    say("1. A double click: two requests with one key at the same moment, and a third one later")
    key, clicks = str(uuid4()), []
    threads = [threading.Thread(target=lambda: clicks.append(shop.order(key))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answer in [*clicks, shop.order(key)]:
        say(f"   {told(answer)}")

    say("2. The same key for something else")
    say(f"   {told(shop.order(key, {**BOOK, 'item': 'pen'}))}")

    say("3. The server is killed (kill -9) after the bank has moved the money, and started again")
    cut, before = str(uuid4()), shop.count("bank_charges")
    click = threading.Thread(target=ignored, args=(shop, cut))
    click.start()
    wait_until(lambda: shop.count("bank_charges") > before)
    shop.kill()
    click.join()
    say(f"   killed: {shop.count('bank_charges')} charges, {shop.count('orders')} order")
    shop.start()
    say(f"   {told(shop.order_until_answered(cut))}")

    say("4. Ann may not order any more: not even see again what she was answered")
    shop.withdraw_permission()
    refused = shop.order(key)
    say(f"   {told(refused)}")

    counts = [shop.count(table) for table in ("bank_charges", "orders", "event_outbox")]
    say()
    say("   {} charges, {} orders, {} events".format(*counts))
    return counts == [2, 2, 2] and refused.status_code == httpx.codes.FORBIDDEN


def ignored(shop: Shop, key: str) -> None:
    try:
        shop.order(key)
    except httpx.TransportError as error:
        say(f"   the client sees: {type(error).__name__}")


if __name__ == "__main__":
    sys.exit(main())
