"""`semel doctor`: a table, JSON, an exit code, and sentences for mistakes."""

from __future__ import annotations

import dataclasses
import json
import re
import signal

import pytest
from typer.testing import CliRunner

from semel.cli.app import app, invoke
from semel.doctor import ROWS, Check, Thresholds
from semel.stores.sql import schema
from support.cli_reference import REFERENCE, documented_fields
from support.relay_process import Running, add


@pytest.fixture
def database(tmp_path):
    url = f"sqlite:///{tmp_path}/shop.db"
    schema.init(url)
    return url


@pytest.fixture
def broker(tmp_path):
    return f"sqlite:///{tmp_path}/broker.db?shards=2"


def semel_cli(*args, **kwargs):
    return CliRunner().invoke(app, ["doctor", *args], **kwargs)


def rows_of(result):
    head, *rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert head == ["what", "verdict", "figure", "what to do"]
    assert [row[0] for row in rows] == [row.name for row in ROWS]
    return {what: rest for what, *rest in rows}


def test_a_relay_that_runs_is_green_and_one_that_is_frozen_is_red(database, broker):
    add(database, range(5))
    with Running("relay", database, "--to", broker) as relay:
        relay.until_owned(2)
        well = semel_cli(database, "--broker", broker, "--wait", "30s")
        # Nobody has joined the topic, which is a warning.
        assert well.exit_code == 0, well.output
        rows = rows_of(well)
        assert rows["canary"][0] == "ok"
        assert rows["shards"][0] == "ok"
        assert rows["fullness"][0] == "warning"

        relay.signal(signal.SIGSTOP)
        frozen = semel_cli(database, "--broker", broker, "--wait", "300ms")
        assert frozen.exit_code == 1
        verdict, figure, advice = rows_of(frozen)["canary"]
        assert verdict == "failed"
        assert figure == "shard 0, 1: not here after 300 ms"
        assert "does not publish it: see its log and /readyz" in advice

        relay.signal(signal.SIGCONT)
        thawed = semel_cli(database, "--broker", broker, "--wait", "30s")
        assert rows_of(thawed)["canary"][0] == "ok"


def test_the_json_has_the_fields_of_the_reference(database):
    result = semel_cli(database, "--json")
    answer = json.loads(result.stdout)

    assert result.exit_code == 1
    assert answer["ok"] is False
    assert documented_fields("`doctor`") == list(answer)
    assert documented_fields("A check") == list(answer["checks"][0])
    [shards] = [check for check in answer["checks"] if check["row"] == "shards"]
    assert shards["verdict"] == "failed"
    assert "semel relay URL --to URL --name default" in shards["advice"]


def test_the_page_tells_of_every_row_and_of_every_threshold():
    page = REFERENCE.with_name("doctor.md").read_text()
    assert re.findall(r"^\| `([a-z ]+)` \| ", page, re.MULTILINE) == [row.name for row in ROWS]
    limits = page.partition("`Thresholds` has")[2]
    told = re.findall(r"^\| (`\w+`(?:, `\w+`)?) \| ", limits, re.MULTILINE)
    fields = [field.name for field in dataclasses.fields(Thresholds)]
    assert re.findall(r"\w+", " ".join(told)) == fields


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [(("ok", "not checked"), 0), (("warning", "ok"), 0), (("ok", "failed"), 1)],
)
def test_the_exit_code_says_whether_anything_failed(database, monkeypatch, verdicts, code):
    async def examine(*_, **__):
        return [Check("lag", verdict, "some") for verdict in verdicts]

    monkeypatch.setattr("semel.cli.doctor.examine", examine)
    assert semel_cli(database).exit_code == code
    assert json.loads(semel_cli(database, "--json").stdout)["ok"] is (code == 0)


def test_the_settings_of_an_examination_are_those_of_the_command(
    database, broker, tmp_path, monkeypatch
):
    asked = {}

    async def examine(_, broker, **settings):
        asked.update(settings, shards=broker and broker.shards)
        return []

    monkeypatch.setattr("semel.cli.doctor.examine", examine)
    assert semel_cli(database).exit_code == 0
    assert asked == {
        "consumers": (),
        "name": "default",
        "canary": True,
        "wait_s": 10.0,
        "thresholds": Thresholds(),
        "shards": None,
    }
    (tmp_path / "broker.db").touch()
    groups = ("--consumer", "billing", "--consumer", "mail")
    options = ("--name", "n", "--no-canary", "--wait", "1m", "--keep", "forever")
    env = {"SEMEL_URL": database, "SEMEL_BROKER": broker}
    assert semel_cli(*groups, *options, env=env).exit_code == 0
    assert asked == {
        "consumers": ["billing", "mail"],
        "name": "n",
        "canary": False,
        "wait_s": 60.0,
        "thresholds": Thresholds(keep_s=None),
        "shards": 2,
    }


@pytest.mark.parametrize(
    ("url", "options", "what"),
    [
        ("", (), "give the store's URL, or set SEMEL_URL"),
        ("redis://localhost", (), "is not the URL of an SQL database"),
        ("sqlite:////no/such/shop.db", (), "nothing at '/no/such/shop.db'"),
        ("{database}", ("--broker", "memory://"), "heard by nobody outside this process"),
        ("{database}", ("--broker", "kafka://localhost"), "is not a broker's URL"),
        ("{database}", ("--broker", "{broker}"), "there is no broker at '"),
        ("{database}", ("--wait", "long"), "--wait 'long' is not a duration"),
        ("{database}", ("--keep", "long"), "--keep 'long' is not a duration"),
    ],
)
def test_a_mistake_is_said(database, broker, url, options, what, monkeypatch):
    monkeypatch.delenv("SEMEL_URL", raising=False)
    given = [text.format(database=database, broker=broker) for text in (url, *options)]
    result = semel_cli(*filter(None, given[:1]), *given[1:])

    assert result.exit_code == 2
    assert what in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("url", "to"),
    [
        ("postgresql://user:s3kret@127.0.0.1:1/shop", "redis://localhost"),
        ("{database}", "redis://:s3kret@127.0.0.1:1"),
        ("{database}", "nats://user:s3kret@127.0.0.1:1"),
    ],
)
def test_whoever_is_down_is_a_red_row_without_a_password(database, capsys, url, to):
    add(database, range(1))
    code = invoke(["doctor", url.format(database=database), "--broker", to, "--wait", "100ms"])

    shown = capsys.readouterr()
    assert code == 1
    assert "\tfailed\t" in shown.out
    assert "s3kret" not in shown.out + shown.err


def test_a_narrow_terminal_shows_every_row(database, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    result = semel_cli(database)
    for row in ROWS:
        assert row.name in result.stdout
    assert "what to do" in result.stdout
