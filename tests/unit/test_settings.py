"""Which store a guard gets, and what is said to somebody who gave something else."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
import sqlalchemy as sa

import semel
from semel.errors import SettingsError


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("/tmp/x.db", "did you mean 'sqlite:////tmp/x.db'?"),
        ("x.db", "did you mean 'sqlite:///x.db'?"),
        (Path("/tmp/x.db"), "did you mean 'sqlite:////tmp/x.db'?"),
        (
            "sqlite:/x.db",
            "did you mean 'sqlite:////x.db' (from the root) or 'sqlite:///x.db' (here)?",
        ),
        ("sqlite:x.db", "did you mean 'sqlite:///x.db'?"),
        ("SQLite:./x.db", "did you mean 'sqlite:///./x.db'?"),
        ("file:/var/ledger", "did you mean 'file:///var/ledger'?"),
        ("redis:/localhost", "write one of memory://"),
        ("nonsense", "write one of memory://"),
        (None, "write one of memory://"),
    ],
)
def test_connect_says_what_to_write_instead(given, hint):
    with pytest.raises(SettingsError) as refused:
        semel.connect(given)
    assert hint in str(refused.value)


@pytest.mark.parametrize(
    ("url", "store"),
    [
        ("Memory://", "MemoryStore"),
        ("FILE://{folder}/ledger", "FileStore"),
        ("SQLite:///{folder}/a.db", "SQLiteStore"),
        ("SQLite+pysqlite:///{folder}/a.db", "SQLStore"),
        ("POSTGRESQL://h/Name", "SQLStore"),
        ("Postgres://h/Name", "SQLStore"),
        ("MySQL://h/Name", "SQLStore"),
        ("MariaDB://h/Name", "SQLStore"),
        ("REDIS://h/0", "RedisStore"),
        ("Rediss://h", "RedisStore"),
        ("Redis+Sentinel://h/Main", "RedisStore"),
        ("Redis+Cluster://h", "RedisStore"),
        ("UNIX:///run/Redis.sock", "RedisStore"),
    ],
)
def test_scheme_in_capitals_opens_the_same_store(url, store, tmp_path):
    opened = semel.connect(url.format(folder=tmp_path))
    assert type(opened).__name__ == store
    assert "name" not in repr(opened)  # what follows the scheme keeps its case


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (redis.Redis(password="s3cret"), "write RedisStore(client)"),
        (sa.create_engine("sqlite://"), "write SQLStore(engine)"),
        (Path("/tmp/x.db"), "'sqlite:////tmp/x.db'"),
        (7, "a URL such as 'sqlite:///semel.db'"),
    ],
    ids=["redis", "sqlalchemy", "path", "int"],
)
def test_what_is_no_store_is_named_by_its_type(given, hint):
    with pytest.raises(SettingsError) as refused:
        semel.configure(store=given)
    assert hint in str(refused.value)
    assert "s3cret" not in str(refused.value)
    assert len(str(refused.value)) < 200
