"""gunicorn --preload and Celery prefork: a store that the parent opened before it forked.

Modules and command lines are those of docs/how-to/deploy-behind.md.
"""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from semel.stores.sql import init
from support.binaries import Binary
from support.process import HOST, ServerProcess, free_port, new_folder, wait_until
from support.proxies import shown

REDIS = "redis://localhost:6379"
ORDERS = [f"o{number}" for number in range(12)]


@pytest.fixture
def store_url(request, tmp_path):
    """The URL of a store with its tables, by the name of its kind."""
    kind = request.param
    if kind in {"postgres", "pgbouncer"}:
        return request.getfixturevalue(f"{kind}_tables_url")
    if kind == "redis":
        return request.getfixturevalue("redis_url")
    url = f"{kind}:///{tmp_path}/semel.db"
    if kind != "sqlite":
        init(url)
    return url


ENGINES = ["sqlite", "sqlite+pysqlite", "postgres", "redis"]
WITH_POOLER = [*ENGINES, "pgbouncer"]


class Forking(ServerProcess):
    """A program of the page, in a folder with a module of the page."""

    def effects(self):
        """The orders that were charged, each as often as it was."""
        return [line.split()[0] for line in self._lines()]

    def pids(self):
        """The processes that charged them."""
        return {line.split()[1] for line in self._lines()}

    def _lines(self):
        file = self.folder / "effects"
        return file.read_text().splitlines() if file.exists() else []


class Gunicorn(Forking):
    def probe(self):
        httpx.get(f"http://{HOST}:{self.port}/", timeout=2)


class CeleryWorker(Forking):
    def probe(self):
        assert b" ready." in (self.folder / "server.log").read_bytes(), "it starts"


@pytest.fixture
def start():
    """Run a command line of the page, in a folder with the module that has this text."""
    made = []

    def run(kind, command, module, containing, chdir, replaced):
        folder, port, text = new_folder(module), free_port(), shown("py", containing)
        for old, new in replaced.items():
            assert old in text, old
            text = text.replace(old, new)
        (folder / f"{module}.py").write_text(text)
        program, *words = shlex.split(command.replace(f"{HOST}:8000", f"{HOST}:{port}"))
        binary = Binary(program, Path(sys.executable).with_name(program), "venv")
        made.append(kind(binary, [chdir, str(folder), *words], port, folder).start())
        return made[-1]

    yield run
    for server in made:
        server.kill()  # both take seconds to end by themselves
        server.stop()


# --- gunicorn -----------------------------------------------------------------------------------


@pytest.mark.parametrize("store_url", WITH_POOLER, indirect=True)
@pytest.mark.parametrize("app", ["shop:app", "shop:asgi_app"], ids=["WSGI", "uvicorn-worker"])
async def test_preloaded_workers_have_one_effect_per_order(app, store_url, start):
    (command,) = [line for line in shown("sh", "gunicorn").splitlines() if line.endswith(app)]
    replaced = {f"{REDIS}/0": store_url}
    server = start(Gunicorn, command, "shop", "WSGIMiddleware", "--chdir", replaced)
    limits = httpx.Limits(max_keepalive_connections=0)  # so that both workers answer
    async with httpx.AsyncClient(
        base_url=f"http://{HOST}:{server.port}", limits=limits, timeout=30
    ) as client:

        def pay(order, key):
            return client.post(f"/pay/{order}", headers={"idempotency-key": f"{key}-{order}"})

        first = await asyncio.gather(*(pay(order, "first") for order in ORDERS * 2))
        assert {answer.status_code for answer in first} <= {201, 409}, [a.text for a in first]
        if store_url.startswith("sqlite"):
            charge_outside(server.folder)
        pids, tries = set(), 0
        while len(pids) < 2 and (tries := tries + 1) < 50:  # until both workers have answered
            again = await asyncio.gather(*(pay(order, f"again-{tries}") for order in ORDERS))
            assert {answer.status_code for answer in again} == {201}, [a.text for a in again]
            pids |= {answer.text.rpartition(" ")[2] for answer in again}
    assert len(pids) == 2
    assert sorted(server.effects()) == sorted(["warm-up", *ORDERS])


def charge_outside(folder):
    """Repeat the orders in a process of its own, which opens the file, and closes it at its end."""
    code = f"import shop\nfor order in {ORDERS!r}: shop.charge(order)"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=60)


# --- Celery -------------------------------------------------------------------------------------


@pytest.fixture
def tasks(store_url, redis_server, start):
    redis_server.ensure_running()
    broker = f"redis://{HOST}:{redis_server.port}"
    replaced = {f"{REDIS}/0": store_url, f"{REDIS}/1": f"{broker}/1"}
    worker = start(
        CeleryWorker, shown("sh", "celery").strip(), "tasks", "Celery(", "--workdir", replaced
    )
    return worker, f"{broker}/1"


@pytest.mark.parametrize("store_url", ENGINES, indirect=True)
def test_prefork_children_charge_each_order_once(tasks):
    from celery import Celery

    worker, broker = tasks
    with Celery("tasks", broker=broker) as sender:
        sender.conf.task_ignore_result = True
        for order in ORDERS * 3:
            sender.send_task("tasks.charge", (order,))
        wait_until(lambda: len(set(worker.effects())) > len(ORDERS), "every order to be charged")
        sender.send_task("tasks.charge", ("last",))
        wait_until(lambda: "last" in worker.effects(), "the last order to be charged")
    assert sorted(worker.effects()) == sorted(["warm-up", "last", *ORDERS])
    assert len(worker.pids()) > 1, "the parent, and one child or both"
