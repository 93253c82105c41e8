"""`semel gateway`: what it says to mistakes, and what it takes from the application."""

from __future__ import annotations

import inspect
import os
import socket

import httpx
import pytest
from typer.testing import CliRunner

from semel.bus import BlockingPublisher
from semel.cli.app import app
from semel.errors import SettingsError
from semel.http.sse import Gateway, Limits
from semel.stores import SQLiteStore
from support.process import HOST
from support.proxy import Proxy
from support.relay_process import Running


@pytest.fixture
def url(tmp_path):
    SQLiteStore(tmp_path / "log.db").close()
    return f"sqlite:///{tmp_path}/log.db"


def semel_cli(*words):
    return CliRunner().invoke(app, ["gateway", *words])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--base", "jobs"), "a path as in"),
        (("--domain", "a:b"), "a domain has a name without a colon"),
        (("--cors", "*", "--credentials"), "name the origins"),
        (("--authorise", "nothing"), "is not MODULE:NAME"),
        (("--authorise", "nowhere:viewer"), "there is no module 'nowhere'"),
        (("--max-age", "soon"), "is not a duration"),
        (("--head-timeout", "0", "--port", "0"), "--head-timeout 0s is not positive; write 10s"),
        (("--retry-ms", "soon"), "--retry-ms soon: write 500-2500, or one number"),
        (("--retry-ms", "900-100"), "retry_ms=(900, 100)"),
        (("--reauthorise", "often"), "is not a duration"),
        (("--write-within", "0"), "write_within_s=0"),
        (("--accepts-per-s", "0"), "accepts_per_s=0"),
        (("--ticket-within", "30s"), "--ticket-within needs --tickets"),
    ],
)
def test_what_cannot_work_is_said_and_ends_it(url, options, said):
    answer = semel_cli(url, *options)
    assert answer.exit_code == 2
    assert said in answer.stderr


def test_a_port_that_is_taken_is_said(url):
    with socket.create_server((HOST, 0)) as taken:
        port = str(taken.getsockname()[1])
        answer = semel_cli(url, "--port", port)
    assert answer.exit_code == 2
    assert f"cannot listen at {HOST}:{port}" in answer.stderr


def test_a_store_that_is_not_there_or_has_no_log_is_refused(tmp_path):
    for store, said in (
        (f"sqlite:///{tmp_path}/none.db", "there is nothing at"),
        ("memory://", "lives inside the process"),
        (f"file://{tmp_path}", "has no log"),
    ):
        answer = semel_cli(store)
        assert answer.exit_code == 2
        assert said in answer.stderr


def test_a_database_without_the_logs_tables_is_refused(postgres_url):
    answer = semel_cli(postgres_url, "--port", "0")
    assert answer.exit_code == 2
    assert "semel db" in answer.stderr


def test_a_store_that_is_not_there_yet_is_waited_for(redis_server, redis_url):
    with BlockingPublisher(redis_url) as publisher, Proxy(redis_server.port) as proxy:
        publisher.publish("7", "vision", 10, {})
        proxy.refuse()
        url = redis_url.replace(f":{redis_server.port}", f":{proxy.port}")
        with Running("gateway", url, "--port", "0") as running:
            at = running.said.partition("jobs at ")[2].partition("JOB_ID")[0]
            running.until(lambda: httpx.get(f"{at}7").status_code == 503, "it to say so")
            proxy.pass_through()
            running.until(lambda: httpx.get(f"{at}7").status_code == 200, "the store")
            assert running.stop() == 0


def test_without_a_server_the_extra_is_named(url, monkeypatch):
    monkeypatch.setattr("semel.cli.serving.find_spec", lambda _: None)
    answer = semel_cli(url)
    assert answer.exit_code == 2
    assert "pip install 'semel[gateway]'" in answer.stderr


@pytest.mark.parametrize(
    ("options", "times"),
    [((), 1), (("--authorise", "views:viewer"), 0), (("--tickets",), 0)],
)
def test_without_authorise_the_start_says_that_everyone_may_read(url, tmp_path, options, times):
    (tmp_path / "views.py").write_text("def viewer(request, job_id):\n    return None\n")
    with Running("gateway", url, "--port", "0", *options, cwd=tmp_path) as running:
        assert running.said.count("everyone who knows a job's id may read it") == times
        assert running.stop() == 0


def test_functions_of_the_application_say_who_may_see_what(url, tmp_path):
    (tmp_path / "views.py").write_text(
        "def viewer(request, job_id):\n"
        "    return request.header('x-user')\n"
        "def shown(event, principal):\n"
        "    return event | {'data': principal}\n"
    )
    store = SQLiteStore(tmp_path / "log.db")
    BlockingPublisher(store).publish("7", "vision", 10, {"secret": 1})
    store.close()
    words = ("--authorise", "views:viewer", "--project", "views:shown", "--base", "/jobs")
    with Running("gateway", url, "--port", "0", *words, cwd=tmp_path) as running:
        at = running.said.partition("jobs at ")[2].partition("JOB_ID")[0]
        assert at.endswith("/jobs/")
        assert httpx.get(f"{at}7").status_code == 403
        assert httpx.get(f"{at}7", headers={"x-user": "eve"}).json()["data"] == "eve"
        assert running.metric("semel_gateway_refused_total") == 1
        assert running.stop() == 0


OPTIONS = [
    ("--retry-ms", "700-800"),
    ("--reauthorise", "forever"),
    ("--per-principal", "7"),
    ("--accepts-per-s", "8.5"),
    ("--behind-events", "9"),
    ("--behind-bytes", "1000"),
    ("--write-within", "11s"),
    ("--connections", "12"),
    ("--heartbeat", "13s"),
    ("--max-age", "14m"),
    ("--cors", "https://shop.example"),
    ("--base", "/jobs"),
    ("--domain", "video"),
]


def test_options_given_are_those_of_the_gateway(url, monkeypatch):
    made = []

    def gateway(store, **how):
        made.append(how)
        raise SettingsError("enough")

    monkeypatch.setattr("semel.cli.gateway.Gateway", gateway)
    words = [word for option in OPTIONS for word in option]
    flags = ("--wait", "--credentials", "--tickets", "--ticket-within", "20s")
    answer = semel_cli(url, "--authorise", "os:getcwd", "--project", "os:fspath", *flags, *words)
    assert "enough" in answer.stderr
    [how] = made
    assert how.pop("limits") == Limits(12, 7, 8.5, 9, 1000, 11.0)
    assert how.pop("tickets")._within_s == 20.0
    assert how == {
        "domain": "video",
        "base": "/jobs",
        "authorise": os.getcwd,
        "project": os.fspath,
        "cors": ["https://shop.example"],
        "credentials": True,
        "unknown": "wait",
        "heartbeat_s": 13.0,
        "max_age_s": 840.0,
        "reauthorise_s": None,
        "retry_ms": (700, 800),
    }


def test_options_left_out_are_the_defaults_of_the_gateway(url, monkeypatch):
    made = []

    def gateway(store, **how):
        made.append(how)
        raise SettingsError("enough")

    monkeypatch.setattr("semel.cli.gateway.Gateway", gateway)
    semel_cli(url)
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(Gateway).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert made == [{**defaults, "limits": Limits()}], "each setting of the class has its option"


def test_browser_waits_as_long_as_retry_ms_says(url, tmp_path):
    store = SQLiteStore(tmp_path / "log.db")
    BlockingPublisher(store).publish("7", "done", 50, {})
    store.close()
    with Running("gateway", url, "--port", "0", "--retry-ms", "1234") as running:
        at = running.said.partition("jobs at ")[2].partition("JOB_ID")[0]
        stream = httpx.get(f"{at}7", headers={"accept": "text/event-stream"})
        assert stream.text.startswith("retry: 1234\n")
        assert running.stop() == 0
