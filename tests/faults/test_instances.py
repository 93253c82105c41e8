"""Several stores, engines, brokers and middlewares on one place, in processes that come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from semel.stores.sql import init
from support.instance_world import STORES, Place, World
from support.process import fast_folder

ROUNDS = 10

SQL = (*STORES, "middleware")
REDIS = ("store", "default", "middleware", "broker")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that is linked from beside it."""
    with TemporaryDirectory(dir=fast_folder()) as name:
        folder = Path(name) / "here"
        folder.mkdir()
        (Path(name) / "link").symlink_to(folder)
        yield folder


def paths(folder: Path, name: str) -> list[str]:
    """One file: absolute, with `..` in it, and through a linked folder."""
    return [f"{folder}/{name}", f"{folder}/../here/{name}", f"{folder.parent}/link/{name}"]


def on_files(folder: Path, _: Any) -> Place:
    return Place(folder, [f"file://{path}" for path in paths(folder, "ledger")], has_log=False)


def on_sqlite(folder: Path, _: Any) -> Place:
    urls = [f"sqlite:///{path}" for path in ("semel.db", *paths(folder, "semel.db"))]
    urls.append(f"SQLite:///{folder}/semel.db")
    kinds = ("store", "default", "middleware", "broker", "application")
    return Place(folder, urls, kinds, file=folder / "semel.db")


def on_sqlite_by_sqlalchemy(folder: Path, _: Any) -> Place:
    urls = [f"sqlite+pysqlite:///{path}" for path in ("semel.db", *paths(folder, "semel.db"))]
    init(urls[1])
    return Place(folder, urls, (*SQL, "broker", "application"), file=folder / "semel.db")


def on_postgres(folder: Path, fixture: Callable[[str], str]) -> Place:
    url = fixture("postgres_tables_url")
    urls = [url, url.replace("postgresql:", "Postgres:"), f"{url}?connect_timeout=5"]
    return Place(folder, [*urls, url.replace("127.0.0.1", "localhost")], SQL)


def on_mariadb(folder: Path, fixture: Callable[[str], str]) -> Place:
    url = fixture("mariadb_tables_url")
    return Place(folder, [url, url.replace("mysql:", "MariaDB:"), f"{url}?charset=utf8mb4"], SQL)


def on_redis(folder: Path, fixture: Callable[[str], str]) -> Place:
    url = fixture("redis_url")
    urls = [url, url.removesuffix("/0"), url.replace("127.0.0.1", "localhost")]
    return Place(folder, [*urls, url.replace("redis:", "REDIS:")], REDIS)


def on_cluster(folder: Path, fixture: Callable[[str], str]) -> Place:
    url = fixture("redis_cluster_url")
    return Place(folder, [url, url.replace("redis+", "Redis+")], REDIS)


def on_nats(folder: Path, fixture: Callable[[str], str]) -> Place:
    url = fixture("nats_url")
    return Place(folder, [url, url.replace("127.0.0.1", "localhost")], ["broker"], has_log=False)


@pytest.mark.parametrize(
    ("place", "seed"),
    [
        (on_files, 0),
        *((on_sqlite, seed) for seed in range(4)),
        *((on_sqlite_by_sqlalchemy, seed) for seed in range(2)),
        *((place, 0) for place in (on_postgres, on_mariadb, on_redis, on_cluster, on_nats)),
    ],
)
def test_instances_that_come_and_go_leave_one_effect_for_each_key(
    place: Callable[..., Place], seed: int, folder: Path, request: pytest.FixtureRequest
) -> None:
    with World(place(folder, request.getfixturevalue), seed) as world:
        world.play(ROUNDS)


def test_store_of_the_other_kind_refused_by_the_file_leaves_the_locks(folder: Path) -> None:
    """`SQLiteStore` and `SQLStore` do not open each other's file."""
    with World(on_sqlite(folder, None), seed=0) as world:
        process = world.start()
        world.meet(process)
        process.open("other", "store", f"sqlite+pysqlite:///{folder}/semel.db")
        with pytest.raises(AssertionError, match="SettingsError"):
            process.ask("call", calls=[["other", "sync", "refused"]])
        process.close("other")
        world.stay = [process]
        world.meet(process)
        world.check()


@pytest.mark.parametrize("second", ["store", "default", "middleware", "broker", "application"])
@pytest.mark.parametrize("first", ["store", "broker", "application"])
def test_second_component_on_a_sqlite_file_leaves_the_locks_of_the_first(
    folder: Path, first: str, second: str
) -> None:
    with World(on_sqlite(folder, None), seed=0) as world:
        visitor = world.start()
        world.use(visitor, "before")
        visitor.end()
        process = world.start()
        process.close(process.names[0])
        name = world.open(process, first)
        world.use(process, "first")
        process.close(world.open(process, second))
        world.look_at_files(process)
        world.open(process, second)
        world.look_at_files(process)
        visitor = world.start()
        world.use(visitor, "first")
        visitor.end()
        world.look_at_files(process)
        process.close(name)
        world.use(process, "last")
        world.stay = [process]
        world.check()
