"""`semel relay`, `semel outbox` and `semel worker`: what they answer, and to which mistakes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from semel.cli import command, line, show
from semel.cli.app import app, invoke
from semel.health import Report
from semel.relay import Relay, RelayStatus
from semel.stores.sql import SQLStore, schema
from semel.stores.sql.outbox_lag import Holder, Lag
from semel.stores.sql.outbox_reading import Lane, OutboxReader
from support.cli_reference import documented_fields
from support.process import wait_until
from support.relay_process import Running, add, engine_of, lying_in, numbers_of

NOWHERE = "postgresql://127.0.0.1:1/shop"


@pytest.fixture
def database(tmp_path):
    url = f"sqlite:///{tmp_path}/shop.db"
    schema.init(url)
    return url


@pytest.fixture(params=["sqlite", "postgres"])
def any_database(request):
    if request.param == "sqlite":
        return request.getfixturevalue("database")
    url = request.getfixturevalue("postgres_url")
    schema.init(url)
    return url


@pytest.fixture
def broker(tmp_path):
    return f"sqlite:///{tmp_path}/broker.db"


def semel_cli(*args, **kwargs):
    return CliRunner().invoke(app, list(args), **kwargs)


def answer(*args, **kwargs):
    result = semel_cli(*args, "--json", **kwargs)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def advance(url, count, shards=1):
    """As a relay would that has published so many of the events."""

    async def work():
        store = SQLStore(url)
        reader = OutboxReader(store, shards=shards)
        for shard in range(shards):
            cursor = await reader.take(shard, fence=time.time_ns())
            if count:
                page = await reader.read(cursor, Lane("", 0), limit=count)
                await reader.advance(cursor, position=page.upto, tails={}, lanes={})
        await store.aclose()

    asyncio.run(work())


def left_in(url):
    """The numbers of the events in the table."""
    engine = engine_of(url)
    with engine.connect() as connection:
        rows = connection.execute(sa.text("SELECT payload FROM event_outbox ORDER BY id"))
        numbers = [json.loads(payload)["n"] for (payload,) in rows]
    engine.dispose()
    return numbers


# --- semel relay --------------------------------------------------------------------------------


@contextlib.contextmanager
def told_to_end(when, number=signal.SIGTERM):
    """Send this process a signal, as soon as something is so."""

    def tell():
        wait_until(when, "what it is told after")
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=tell)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_relay_runs_until_it_is_told_to_end(database, broker, tmp_path, number):
    add(database, range(3))
    before = signal.getsignal(number)
    with told_to_end(lambda: entries(tmp_path / "broker.db") == 3, number):
        result = semel_cli("relay", database, "--to", broker, "--source", "/shop")

    assert result.exit_code == 0
    assert result.stdout == ""
    assert "relay default: ending, as soon as what is in hand is finished" in result.stderr
    assert signal.getsignal(number) is before
    [message, *_] = asyncio.run(lying_in(broker))
    assert message.source == "/shop"


def test_a_pipe_gets_lines_that_say_when(database, broker, monkeypatch):
    shown, plain = [], line._Kept.show
    monkeypatch.setattr(line, "EVERY_S", 0.05)
    monkeypatch.setattr(line._Kept, "show", lambda *said: (plain(*said), shown.append(said[1])))
    add(database, range(3))
    with told_to_end(lambda: any("1 of 1 shards, " in each for each in shown)):
        result = semel_cli("relay", database, "--to", broker)

    lines = result.stderr.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ relay default: ", each) for each in lines)
    assert len(lines) < 8, "it repeats itself"
    assert lines[0].endswith(f"from {database} to {broker}")
    assert any("1 of 1 shards, " in each for each in lines)


def test_a_quiet_relay_says_nothing(database, broker, tmp_path):
    add(database, range(3))
    with told_to_end(lambda: entries(tmp_path / "broker.db") == 3):
        result = semel_cli("relay", database, "--to", broker, "--quiet")

    assert result.exit_code == 0
    assert result.output == ""


class Said:
    """A line whose every text stays."""

    def __init__(self, *, kept=True):
        self.kept = kept
        self.lines = []

    def say(self, text):
        self.lines.append(text)

    show = say


class Watched:
    """A relay that is as it is told to be."""

    title = "relay default"

    def __init__(self, **status):
        self.now = RelayStatus("default", 4, **status)
        self.lag = Lag(12_000, 75.0, {}, [], 0, None, [])
        self.silence = ""

    def status(self):
        return self.now

    async def report(self):
        return Report(self.now, self.lag, self.silence)


@contextlib.asynccontextmanager
async def telling(watched, said):
    task = asyncio.create_task(line.tell(watched, said, lambda text: text.replace("pw", "***")))
    yield
    task.cancel()


async def heard(said, count):
    async with asyncio.timeout(10):
        while len(said.lines) < count:
            await asyncio.sleep(0.005)


async def test_the_line_says_what_changes_and_what_is_wrong(monkeypatch):
    monkeypatch.setattr(line, "EVERY_S", 0.01)
    watched, said = Watched(owned=(0, 1), published=1234), Said()
    async with telling(watched, said):
        await heard(said, 1)
        watched.now = RelayStatus(
            "default",
            4,
            owned=(0,),
            published=1234,
            held={"slow": "its readers are behind"},
            outage="no\nroute to pw",
            stopped={3: "another story"},
        )
        watched.lag, watched.silence = None, "the store sleeps"
        await heard(said, 2)
        await asyncio.sleep(0.05)
    first, second = said.lines
    assert first.startswith("relay default: 2 of 4 shards, 1,234 published, ")
    assert first.endswith("/s, lag 1 min 15 s, 12,000 unpublished")
    assert second == (
        "relay default: 1 of 4 shards, 1,234 published, 0/s, lag unknown, slow waits, "
        "the store sleeps, no route to ***, another story"
    )


async def test_the_line_is_said_again_now_and_then(monkeypatch):
    monkeypatch.setattr(line, "EVERY_S", 0.01)
    monkeypatch.setattr(line, "KEPT_EVERY_S", 0.05)
    said = Said()
    async with telling(Watched(), said):
        await heard(said, 3)
    assert len(set(said.lines)) == 1


def test_what_is_logged_has_its_traceback_and_no_passwords():
    said = Said()
    log = logging.getLogger("test of lines")
    handler = line._Handler(said, lambda text: show.redact(text, "redis://:pw@h"))
    log.addHandler(handler)
    try:
        raise RuntimeError("cannot reach redis://:pw@h")
    except RuntimeError:
        log.exception("it failed with pw")
    log.info("no news")
    log.removeHandler(handler)
    [text] = said.lines
    assert text.startswith("ERROR: it failed with ***\nTraceback")
    assert "pw" not in text


def entries(path):
    with contextlib.suppress(sqlite3.OperationalError):
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        with contextlib.closing(connection):
            return connection.execute("SELECT COUNT(*) FROM broker_entry").fetchone()[0]
    return 0


def test_the_settings_of_a_relay_are_those_of_the_command(database, broker, monkeypatch):
    made = {}

    class Told(Relay):
        def __init__(self, store, broker, **settings):
            made.update(settings, shards=broker.shards)
            super().__init__(store, broker, **settings)

        async def run(self):
            pass

    monkeypatch.setattr("semel.cli.relay.Relay", Told)
    to = f"{broker}?shards=4"
    assert semel_cli("relay", database, "--to", to).exit_code == 0
    assert made == {
        "name": "default",
        "source": "",
        "batch": 1000,
        "lease_s": 10.0,
        "keep_s": 3600.0,
        "notify": False,
        "shards": 4,
    }
    options = ("--name", "n", "--batch", "5", "--keep", "forever", "--lease", "2m", "--notify")
    env = {"SEMEL_URL": database, "SEMEL_BROKER": to}
    assert semel_cli("relay", *options, env=env).exit_code == 0
    assert made == {
        "name": "n",
        "source": "",
        "batch": 5,
        "lease_s": 120.0,
        "keep_s": None,
        "notify": True,
        "shards": 4,
    }


@pytest.mark.parametrize(
    ("url", "options", "what"),
    [
        ("", (), "give the store's URL, or set SEMEL_URL"),
        ("{database}", (), "give the broker's URL with --to, or set SEMEL_BROKER"),
        ("{database}", ("--to", "memory://"), "heard by nobody outside this process"),
        ("{database}", ("--to", "kafka://localhost"), "is not a broker's URL"),
        ("{database}", ("--to", "{broker}?shards=many"), "is not a whole number"),
        ("memory://", ("--to", "{broker}"), "lives inside the process"),
        ("redis://localhost", ("--to", "{broker}"), "is not the URL of an SQL database"),
        ("nonsense", ("--to", "{broker}"), "is not the URL of an SQL database"),
        ("sqlite:////no/such/shop.db", ("--to", "{broker}"), "nothing at '/no/such/shop.db'"),
        ("{database}", ("--to", "{broker}", "--keep", "1y"), "1h, 7d or forever"),
        ("{database}", ("--to", "{broker}", "--lease", "0"), "--lease 0 is too short"),
        ("{database}", ("--to", "{broker}", "--batch", "0"), "--batch"),
        ("{database}", ("--to", "{broker}", "--grace", "1x"), "--grace '1x' is not a duration"),
        ("{database}", ("--to", "{broker}", "--http", "8080"), "'8080' is not HOST:PORT"),
        ("{database}", ("--to", "{broker}", "--http", "192.0.2.1:80"), "cannot listen at"),
        ("{database}", ("--to", "{broker}", "--name", ""), "a name of relays has 1 to 255 bytes"),
    ],
)
def test_a_mistake_is_said_and_nothing_runs(database, broker, url, options, what, monkeypatch):
    monkeypatch.delenv("SEMEL_URL", raising=False)
    given = [text.format(database=database, broker=broker) for text in (url, *options)]
    result = semel_cli("relay", *filter(None, given[:1]), *given[1:])

    assert result.exit_code == 2
    assert what in result.stderr
    assert "Traceback" not in result.stderr
    assert "relay default: from" not in result.stderr, "it is told to have begun"


@pytest.mark.parametrize("words", [("relay", "--to", "{broker}"), ("outbox", "status")])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_without_tables_it_says_how_to_make_them(request, tmp_path, broker, kind, words):
    url = f"sqlite:///{tmp_path}/empty.db"
    (tmp_path / "empty.db").touch()
    if kind == "postgres":
        url = request.getfixturevalue("postgres_url")
    head, *rest = (word.format(broker=broker) for word in words)
    result = semel_cli(head, *rest, url)

    assert result.exit_code == 2
    assert "run `semel db " in result.stderr
    assert "Traceback" not in result.stderr


def test_another_number_of_shards_ends_it(database, broker):
    advance(database, 0, shards=2)
    result = semel_cli("relay", database, "--to", f"{broker}?shards=3")

    assert result.exit_code == 2
    assert "have 2 shards, and this one was told 3" in result.stderr
    assert "semel outbox reshard URL --name default --shards 3" in result.stderr


@pytest.mark.parametrize(
    ("library", "extra", "url", "to"),
    [
        ("sqlalchemy", "sql", "{database}", "{broker}"),
        ("psycopg", "postgres", NOWHERE, "{broker}"),
        ("redis", "redis", "{database}", "redis://localhost"),
    ],
)
def test_without_a_library_it_says_what_to_install(database, broker, library, extra, url, to):
    given = [text.format(database=database, broker=broker) for text in (url, "--to", to)]
    code = (
        f"import sys; sys.modules[{library!r}] = None; sys.argv[1:] = {['relay', *given]!r}; "
        "from semel.cli import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert result.returncode == 2, result.stderr
    assert f"pip install 'semel[{extra}]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("relay", "{url}", "--to", "redis://:s3kret@localhost?shards=x"),
        ("relay", "{url}", "--to", "nonsense://u:s3kret@h"),
        ("relay", "sqlite:///{path}", "--to", "redis://:s3kret@localhost", "--http", "nowhere"),
        ("outbox", "status", "{url}"),
        ("outbox", "sweep", "{url}"),
        ("parked", "list", "{url}"),
        ("parked", "list", "redis://:s3kret@127.0.0.1:1"),
    ],
    ids=" ".join,
)
def test_no_password_is_ever_printed(args, capsys, database):
    url, path = "postgresql://user:s3kret@127.0.0.1:1/shop", database.removeprefix("sqlite:///")
    code = invoke([arg.format(url=url, path=path) for arg in args])

    shown = capsys.readouterr()
    assert code in (2, 3)
    assert shown.err
    assert "s3kret" not in shown.out + shown.err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("500ms", 0.5), ("10s", 10), ("5m", 300), ("1.5h", 5400), (" 7 D ", 604_800)],
)
def test_durations(text, seconds):
    assert command.seconds("--keep", text) == seconds


# --- semel outbox -------------------------------------------------------------------------------


def test_the_sweep_never_passes_what_is_published(any_database):
    add(any_database, range(10), aggregates=1)
    assert answer("outbox", "sweep", any_database, "--keep", "0") == {"swept": 0}

    advance(any_database, 4)
    swept = semel_cli("outbox", "sweep", any_database, "--keep", "0s")
    assert swept.stdout == "4 published events deleted\n"
    assert left_in(any_database) == [4, 5, 6, 7, 8, 9]
    assert asyncio.run(swept_to(any_database)) > 0
    assert answer("outbox", "sweep", any_database, "--keep", "0") == {"swept": 0}


async def swept_to(url):
    store = SQLStore(url)
    try:
        return await OutboxReader(store).swept_to()
    finally:
        await store.aclose()


def test_the_sweep_keeps_what_is_young_and_stops_at_its_limit(database):
    add(database, range(10), aggregates=1)
    advance(database, 10)

    assert answer("outbox", "sweep", database) == {"swept": 0}
    assert answer("outbox", "sweep", database, "--keep", "0", "--limit", "3") == {"swept": 3}
    assert left_in(database) == [3, 4, 5, 6, 7, 8, 9]


def test_what_is_swept_has_been_published(database, broker):
    add(database, range(5))
    with Running("relay", database, "--to", broker) as relay:
        relay.until(lambda: relay.status.get("unpublished") == 0, "it to catch up")
        add(database, range(5, 10))
        answer("outbox", "sweep", database, "--keep", "0")
        relay.until(lambda: relay.metric("semel_relay_published_total") == 10, "all")
        assert relay.stop() == 0
    assert numbers_of(asyncio.run(lying_in(broker))) == list(range(10))


def test_the_status_tells_of_every_name(any_database):
    nobody = answer("outbox", "status", any_database)
    assert nobody["relays"] == [
        {
            "name": "default",
            "shards": 1,
            "lag_s": 0.0,
            "unpublished": 0,
            "behind": [],
            "positions": [0],
        }
    ]
    add(any_database, range(10), aggregates=1)
    advance(any_database, 4, shards=1)

    told = answer("outbox", "status", any_database)
    [relay] = told["relays"]
    assert (relay["name"], relay["shards"], relay["unpublished"]) == ("default", 1, 6)
    assert relay["lag_s"] > 0
    assert told["rows"] == 10
    shown = semel_cli("outbox", "status", any_database).stdout
    assert shown.startswith("about 10 rows")
    assert "default\t1\t" in shown


def test_the_status_tells_who_holds_relays_up(database, monkeypatch):
    holders = [Holder(4711, "idle in transaction", 75.0, "UPDATE orders\n\tSET x = 1")]

    async def held(_):
        return Lag(1, 75.0, {0: 3}, ["slow"], 4, 8_200_000, holders)

    monkeypatch.setattr(OutboxReader, "lag", held)
    told = answer("outbox", "status", database)
    assert told["holders"][0]["pid"] == 4711
    assert told["relays"][0]["behind"] == ["slow"]
    shown = semel_cli("outbox", "status", database).stdout
    assert "about 4 rows, 8.2 MB\n" in shown
    assert "4711\tidle in transaction\t1 min 15 s\tUPDATE orders\\n\\tSET x = 1\n" in shown


def test_an_outbox_is_divided_anew_when_all_is_published(any_database):
    add(any_database, range(10), aggregates=1)
    unknown = semel_cli("outbox", "reshard", any_database, "--shards", "4")
    assert unknown.exit_code == 1
    assert "no relay called 'default' has read this outbox" in unknown.stderr

    advance(any_database, 4)
    refused = semel_cli("outbox", "reshard", any_database, "--shards", "4", "--json")
    assert refused.exit_code == 1
    told = json.loads(refused.stdout)
    assert not told["resharded"]
    assert "shard 0 has not published everything" in told["why"]

    advance(any_database, 10)
    assert answer("outbox", "reshard", any_database, "--shards", "4") == {
        "resharded": True,
        "why": None,
    }
    assert answer("outbox", "status", any_database)["relays"][0]["shards"] == 4
    again = semel_cli("outbox", "reshard", any_database, "--shards", "2")
    assert again.stdout == "2 shards; start the relays with a broker that has as many\n"


def test_the_reference_names_the_fields_of_every_answer(database, monkeypatch):
    advance(database, 0)
    told = answer("outbox", "status", database)
    holder = dataclasses.asdict(Holder(1, "", 0.0, ""))

    assert documented_fields("`outbox status`") == list(told)
    assert documented_fields("Relays of one name") == list(told["relays"][0])
    assert documented_fields("A transaction that relays do not pass") == list(holder)
    assert documented_fields("`outbox sweep`") == list(answer("outbox", "sweep", database))
    reshard = answer("outbox", "reshard", database, "--shards", "2")
    assert documented_fields("`outbox reshard`") == list(reshard)


@pytest.mark.parametrize("options", [(), ("--shards", "0"), ("--shards", "257")])
def test_a_number_of_shards_that_cannot_be_is_bad_input(database, options):
    assert semel_cli("outbox", "reshard", database, *options).exit_code == 2


@pytest.mark.parametrize("words", [("status",), ("sweep",), ("reshard", "--shards", "2")])
def test_an_outbox_that_cannot_be_reached_is_said_to_be(words):
    result = semel_cli("outbox", words[0], NOWHERE, *words[1:])

    assert result.exit_code == 3
    assert "did not answer" in result.stderr


# --- semel worker -------------------------------------------------------------------------------


SHOP = """
    import asyncio
    from semel.brokers import connect
    from semel.inbox import SQLInbox
    from semel.worker import Worker

    def make():
        worker = Worker(connect({broker!r}), "billing", SQLInbox({database!r}), lease_s=2.0)

        @worker.on(topic="orders")
        async def placed(message, session):
            print(message.data["n"], flush=True)

        return worker

    async def made_later():
        return make()

    worker = make()
    class Settings:
        worker = worker
    number = 7
    def takes(argument): ...

    def boom():
        return {{}}["CASES_BROKER"]

    async def boom_later():
        return boom()

    def refuses():
        return Worker(connect({broker!r}), "", SQLInbox({database!r}))
"""


@pytest.fixture
def shop(tmp_path, database, broker, monkeypatch):
    """A module of an application's, here."""
    text = textwrap.dedent(SHOP).format(database=database, broker=broker)
    (tmp_path / "shop_of_tests.py").write_text(text)
    (tmp_path / "broken_shop.py").write_text("import semel\n\nraise RuntimeError('no settings')\n")
    (tmp_path / "poor_shop.py").write_text("import no_such_library\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "shop_of_tests"
    for name in ("shop_of_tests", "broken_shop", "poor_shop"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["worker", "make", "made_later", "Settings.worker"])
def test_a_worker_of_the_applications_runs_until_it_is_told_to_end(shop, name, monkeypatch):
    begun = threading.Event()

    async def run(worker):
        assert worker.group == "billing"
        begun.set()
        await worker._stopping.wait()

    monkeypatch.setattr("semel.worker.Worker.run", run)
    with told_to_end(begun.is_set):
        result = semel_cli("worker", f"{shop}:{name}")

    assert result.exit_code == 0, result.output
    assert f"worker billing: {shop}:{name}\n" in result.stderr
    assert result.stderr.endswith("worker billing: ended\n")


def test_a_worker_is_a_process_with_probes(shop, database, broker, tmp_path):
    add(database, range(5), aggregates=1)
    with (
        Running("relay", database, "--to", broker, "--quiet", http=False),
        Running("worker", f"{shop}:worker", cwd=tmp_path) as worker,
    ):
        worker.until(lambda: worker.metric("semel_worker_applied_total") == 5, "five effects")
        assert worker.ask("/healthz")[0] == 200
        assert worker.ready["ready"]
        worker.until(lambda: "1 of 1 shards, " in worker.said, "its line")
        assert worker.stop() == 0


@pytest.mark.parametrize("there", ["nothing", "a ledger"])
def test_a_worker_without_tables_says_how_to_make_them(shop, tmp_path, there):
    (tmp_path / "shop.db").unlink()
    (tmp_path / "shop.db").touch()
    if there == "a ledger":  # of a release before the inbox
        schema.init(f"sqlite:///{tmp_path}/shop.db")
        older = sqlite3.connect(tmp_path / "shop.db")
        for (table,) in older.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' "
            "AND (name GLOB 'inbox_*' OR name GLOB 'event_parked*')"
        ).fetchall():
            older.execute(f"DROP TABLE {table}")
        older.close()
    result = semel_cli("worker", f"{shop}:worker")

    assert result.exit_code == 2
    assert "run `semel db init" in result.stderr


def test_a_worker_without_handlers_is_told_to_have_some(shop, tmp_path):
    with (tmp_path / f"{shop}.py").open("a") as module:
        module.write("worker = Worker(worker.broker, 'idle', worker.inbox)\n")
    result = semel_cli("worker", f"{shop}:worker")

    assert result.exit_code == 2
    assert "this worker has no handler" in result.stderr


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("shop", "'shop' is not MODULE:NAME; write it as in shop.tasks:worker"),
        (":worker", "is not MODULE:NAME"),
        ("shop:", "is not MODULE:NAME"),
        ("no_such_shop:worker", "there is no module 'no_such_shop' here"),
        ("shop_of_tests.tasks:worker", "there is no module 'shop_of_tests.tasks' here"),
        ("poor_shop:worker", "poor_shop could not be imported: ModuleNotFoundError"),
        ("broken_shop:worker", "broken_shop could not be imported: RuntimeError: no settings"),
        ("shop_of_tests:wroker", "has no 'wroker'; its workers are shop_of_tests:worker"),
        ("broken.shop:worker", "there is no module 'broken' here"),
        ("shop_of_tests:number", "shop_of_tests:number is a int, not a Worker"),
        ("shop_of_tests:Settings", "shop_of_tests:Settings gives a Settings, not a Worker"),
        ("shop_of_tests:takes", "cannot be called without arguments"),
        ("shop_of_tests:boom", "shop_of_tests:boom made no worker: KeyError: 'CASES_BROKER'"),
        ("shop_of_tests:boom_later", "made no worker: KeyError: 'CASES_BROKER'"),
        ("shop_of_tests:refuses", "group='' is no name"),
        ("json:tool", "json has no 'tool'; name a Worker, or a function that makes one"),
    ],
)
def test_a_worker_that_is_none_is_said_to_be(shop, where, what):
    result = semel_cli("worker", where)

    assert result.exit_code == 2
    assert what in result.stderr
    own = any(name in where for name in ("broken_shop", "poor_shop", "boom"))
    assert "site-packages" not in result.stderr
    assert ("Traceback" in result.stderr) == own, "a trace is of their error, or there is none"
