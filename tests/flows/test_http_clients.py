"""The three clients against a real server: keys, tries, redirects, streams, intents."""

from __future__ import annotations

import asyncio
import functools
import gzip
import io
import json
import pickle
import re
import socket
import sqlite3
import subprocess
import sys
import threading

import httpx
import pytest
import requests

from semel.client import Intents, Patience
from semel.client.flow import HELD
from semel.client.httpx import AsyncIdempotentTransport
from semel.client.requests import IdempotentAdapter
from semel.errors import IdempotencyConflictError, SettingsError, StoreUnavailableError
from support.client_kinds import FAILED, KINDS, Metronome, client
from support.client_server import (
    Script,
    Stage,
    answer,
    broken_off,
    events,
    held,
    problem,
    serve,
)
from support.process import HOST
from support.proxy import Proxy

RUNNING = problem(409, "in-progress", retry_after=2)
MADE = answer(201, {"id": 7})


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def world():
    return Metronome()


@pytest.fixture(scope="module")
def stage():
    made = Stage()
    with serve(made) as made.url:
        yield made


@pytest.fixture
def release():
    """Set at the latest when the test is over, or the server would wait for it."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def ask(stage, kind):
    """Send one request to a server that follows the script."""
    return functools.partial(asked, stage, kind)


def asked(stage, kind, script, method="POST", *, options=None, path="/orders", **kwargs):
    with stage.plays(script) as url, client(kind, **(options or {})) as asking:
        return asking.ask(method, url + path, **kwargs)


# --- keys ---------------------------------------------------------------------------------------


def test_one_key_over_every_try(ask, world):
    script = Script(RUNNING, answer(503, retry_after=3), MADE)
    got = ask(script, json={"total": 40}, options={"world": world})
    assert (got.status, json.loads(got.body)) == (201, {"id": 7})
    assert len(script.keys) == 3
    assert len(set(script.keys)) == 1
    assert re.fullmatch(r'"[0-9a-f]{32}"', script.keys[0])
    assert {seen.body for seen in script.seen} == {script.seen[0].body}
    assert json.loads(script.seen[0].body) == {"total": 40}
    assert world.slept == [2, 3]


def test_every_request_has_a_key_of_its_own(stage, ask, kind):
    script = Script(MADE, MADE)
    with stage.plays(script) as url, client(kind) as asking:
        for _ in range(2):
            asking.ask("POST", url)
    assert len(set(script.keys)) == 2


def test_a_key_of_the_callers_is_kept(ask, world):
    script = Script(RUNNING, MADE)
    ask(script, "PUT", headers={"idempotency-key": "mine"}, options={"world": world})
    assert script.keys == ["mine", "mine"]


def test_an_empty_header_is_no_key(ask, world):
    script = Script(answer(503), MADE)
    ask(script, headers={"Idempotency-Key": ""}, options={"world": world})
    assert script.keys[0]
    assert script.keys[0] == script.keys[1]
    once = Script(answer(503))
    ask(once, headers={"Idempotency-Key": ""}, options={"world": world, "methods": ()})
    assert len(once.seen) == 1


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
def test_other_methods_get_no_key_and_are_repeated_all_the_same(ask, world, method):
    script = Script(answer(503), answer(200))
    assert ask(script, method, options={"world": world}).status == 200
    assert script.keys == [None, None]


def test_methods_are_yours_to_choose(ask):
    script = Script(MADE)
    ask(script, "PUT", options={"methods": ("put",)})
    assert script.keys[0] is not None


@pytest.mark.parametrize("methods", ["POST", ("POST", "get")])
def test_methods_that_cannot_be_meant_are_refused(kind, methods):
    with pytest.raises(SettingsError):
        KINDS[kind](methods=methods)


# --- no answer ----------------------------------------------------------------------------------


def test_an_answer_that_got_lost_is_asked_for_again(stage, ask, kind, world):
    script = Script(MADE, answer(201, {"id": 7}, idempotent_replayed="true"))
    with stage.plays(script) as url, Proxy(int(url.rpartition(":")[2])) as proxy:
        proxy.cut_after_request(b"POST")
        with client(kind, world=world) as asking:
            got = asking.ask("POST", f"http://{HOST}:{proxy.port}/orders", json={})
        assert proxy.cuts == 1
    assert got.headers["idempotent-replayed"] == "true"
    assert len(script.keys) == 2
    assert len(set(script.keys)) == 1
    assert world.slept == [0.25]


@pytest.mark.parametrize("length", [True, False], ids=["length", "chunked"])
def test_an_answer_that_breaks_off_is_asked_for_again(ask, world, length):
    script = Script(broken_off(b'{"id"', length=length), MADE)
    got = ask(script, options={"world": world})
    assert got.body == b'{"id": 7}'
    assert len(set(script.keys)) == 1
    assert len(world.slept) == 1


def test_a_server_that_is_slow_is_asked_again(stage, kind, world, release):
    script = Script(held(release, MADE), *[MADE] * 4)  # so is a machine that has much to do
    with stage.plays(script) as url, client(kind, world=world) as asking:
        assert asking.ask("POST", url, timeout=0.5).status == 201
        release.set()
    assert len(script.keys) > 1
    assert len(set(script.keys)) == 1


def test_after_the_last_try_the_last_error_is_raised(ask, kind, world):
    with socket.create_server((HOST, 0)) as nobody:
        port = nobody.getsockname()[1]
    with client(kind, world=world) as asking, pytest.raises(FAILED):
        asking.ask("POST", f"http://{HOST}:{port}/")
    assert world.slept == [0.25, 0.5, 1.0, 2.0]


def test_without_a_key_an_unsafe_request_is_sent_once(stage, ask, kind, world):
    script = Script(broken_off(b'{"id"', length=True), answer(503))
    options = {"world": world, "methods": ()}
    with stage.plays(script) as url, client(kind, **options) as asking:
        with pytest.raises(FAILED):
            asking.ask("POST", url)
        assert asking.ask("POST", url).status == 503
    assert script.keys == [None, None]
    assert world.slept == []


def test_a_certificate_that_is_refused_is_not_tried_again(ask, kind, world):
    refused = pytest.raises(FAILED, match="certificate verify failed")
    with serve(Script(), tls=True) as url, client(kind, world=world) as asking, refused:
        asking.ask("POST", url)
    assert world.slept == []


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/", f"http://{HOST}:1/"])
def test_an_error_of_the_request_itself_is_not_tried_again(ask, kind, world, url):
    """The second, at a port that nobody listens on, shows that the first could have been."""
    with client(kind, world=world) as asking, pytest.raises(FAILED):
        asking.ask("POST", url)
    assert len(world.slept) == (0 if url.startswith("ftp") else 4)


# --- answers ------------------------------------------------------------------------------------


def test_after_the_last_try_the_last_answer_is_returned_as_it_is(ask, world):
    busy = answer(503, {"why": "down"}, retry_after=1)
    script = Script(busy, busy, busy)
    options = {"world": world, "patience": Patience(tries=3)}
    got = ask(script, options=options)
    assert (got.status, got.body, got.headers["retry-after"]) == (503, b'{"why": "down"}', "1")
    assert world.slept == [1, 1]


def test_the_whole_takes_no_longer_than_it_may(ask, world):
    script = Script(*[answer(503, retry_after=20)] * 4)
    assert ask(script, options={"world": world}).status == 503
    assert world.slept == [20, 20, 20]


@pytest.mark.parametrize(
    "final",
    [
        answer(500),
        answer(422, {"why": "no such customer"}),
        answer(409, {"why": "sold out"}),
        problem(409, "outcome-unknown"),
        answer(503, stripe_should_retry="false"),
    ],
    ids=["500", "422", "409", "outcome-unknown", "told-not-to"],
)
def test_what_a_repeat_does_not_mend_is_not_repeated(ask, world, final):
    script = Script(final)
    assert ask(script, options={"world": world}).status != 418
    assert len(script.seen) == 1


@pytest.mark.parametrize(
    "passing",
    [
        problem(409, "in-progress"),
        answer(500, stripe_should_retry="true"),
        answer(502),
        answer(504),
        answer(429, retry_after="Tue, 14 Nov 2023 22:13:23 GMT"),
    ],
    ids=["in-progress", "told-to", "502", "504", "429"],
)
def test_what_passes_is_repeated(ask, world, passing):
    script = Script(passing, MADE)
    assert ask(script, options={"world": world}).status == 201
    assert len(world.slept) == 1


def test_a_problem_that_comes_compressed_is_understood(ask, world):
    body = gzip.compress(b'{"type": "urn:semel:problem:in-progress"}')
    kind_of = {"content-type": "application/problem+json", "content-encoding": "gzip"}
    script = Script(answer(409, body, headers=kind_of, length=False), MADE)
    assert ask(script, options={"world": world}).status == 201


def test_an_answer_that_comes_compressed_is_read_once(ask):
    body = gzip.compress(b'{"id": 7}')
    script = Script(answer(201, body, headers={"content-encoding": "gzip"}))
    assert ask(script).body == b'{"id": 7}'


def test_an_answer_too_large_to_hold_arrives_whole(ask):
    body = json.dumps(["x" * 1000] * (3 * HELD // 1000)).encode()
    assert ask(Script(answer(200, body, length=False))).body == body


def test_a_stream_stays_a_stream(stage, kind, release):
    script = Script(events(release, first=b"data: 1\n\n", last=b"data: 2\n\n"))
    with stage.plays(script) as url, client(kind) as asking:
        assert asking.first_of_stream(url, release.set) == (b"data: 1\n\n", b"data: 2\n\n")


@pytest.mark.parametrize("media", ["application/json", "text/plain"])
def test_tries_that_are_thrown_away_give_their_connection_back(ask, world, media):
    large = answer(503, b"x" * 200_000, headers={"content-type": media}, length=False)
    options = {"world": world, "connections": 1}
    assert ask(Script(*[large] * 4, MADE), options=options, timeout=10).status == 201


# --- bodies -------------------------------------------------------------------------------------


def test_a_body_that_can_be_had_once_is_sent_once(ask, world):
    script = Script(answer(503), MADE)
    got = ask(script, content=iter([b"a", b"b"]), options={"world": world})
    assert got.status == 503
    assert [seen.body for seen in script.seen] == [b"ab"]
    assert script.keys[0] is not None


@pytest.mark.parametrize("kind", ["httpx", "requests"])
def test_a_small_file_is_sent_again_in_full(ask, world):
    script = Script(answer(503), MADE)
    ask(script, content=io.BytesIO(b"invoice"), options={"world": world})
    assert [seen.body for seen in script.seen] == [b"invoice", b"invoice"]


@pytest.mark.parametrize("kind", ["httpx", "requests"])
def test_a_large_file_is_sent_once(ask, world):
    script = Script(answer(503), MADE)
    large = io.BytesIO(b"x" * (HELD + 1))
    assert ask(script, content=large, options={"world": world}).status == 503
    assert [len(seen.body) for seen in script.seen] == [HELD + 1]


def test_a_form_with_a_file_is_sent_again_in_full(ask, world):
    script = Script(answer(503), MADE)
    ask(script, files={"scan": ("a.txt", b"ink")}, options={"world": world})
    first, second = script.seen
    assert b"ink" in first.body
    assert first.body == second.body


# --- redirects ----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [307, 308])
def test_a_request_that_is_sent_elsewhere_takes_its_key_along(ask, status):
    script = Script(answer(status, location="/v2/orders"), MADE)
    got = ask(script, json={"total": 40})
    assert (got.status, got.path) == (201, "/v2/orders")
    assert script.keys[0] is not None
    assert script.keys[0] == script.keys[1]
    assert script.seen[0].body == script.seen[1].body


def test_a_file_that_is_sent_elsewhere_arrives(ask, kind):
    script = Script(answer(307, location="/v2"), MADE)
    content = b"invoice" if kind == "async-httpx" else io.BytesIO(b"invoice")
    assert ask(script, content=content).status == 201
    assert [seen.body for seen in script.seen] == [b"invoice", b"invoice"]


def test_the_page_that_a_request_leads_to_is_fetched_without_a_key(ask):
    script = Script(answer(303, location="/orders/7"), answer(200))
    got = ask(script, headers={"Idempotency-Key": '"mine"'})
    assert (got.status, got.path) == (200, "/orders/7")
    assert script.keys == ['"mine"', None]
    assert script.seen[1].method == "GET"


# --- intents ------------------------------------------------------------------------------------


@pytest.fixture
def intents(tmp_path):
    with Intents(tmp_path / "keys.db") as opened:
        yield opened


def test_an_intent_is_on_disk_with_its_request_before_the_server_hears_of_it(
    ask, intents, tmp_path
):
    found = []

    async def look(seen, send):
        with sqlite3.connect(tmp_path / "keys.db") as file:
            query = "SELECT idempotency_key, length(request_hash), answered_us FROM semel_intents"
            found.append((seen.key, *file.execute(query).fetchone()))
        file.close()
        await MADE(seen, send)

    ask(Script(look), headers=intents.headers("invoice-7"), options={"intents": intents})
    [(sent, stored, length, answered)] = found
    assert sent == f'"{stored}"'
    assert (length, answered) == (32, None)
    assert intents.unanswered() == []


def test_an_intent_sends_the_same_key_until_it_is_answered_and_after(
    stage, ask, kind, intents, world
):
    script = Script(answer(500), answer(201), answer(201, idempotent_replayed="true"))
    left = []
    with stage.plays(script) as url, client(kind, intents=intents, world=world) as asking:
        for _ in range(3):
            asking.ask("POST", url, json={}, headers=intents.headers("invoice-7"))
            left.append([each.name for each in intents.unanswered()])
    assert len(set(script.keys)) == 1
    assert left == [["invoice-7"], [], []]


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [("PATCH", "/a", b"1"), ("POST", "/b", b"1"), ("POST", "/a?x=1", b"1"), ("POST", "/a", b"2")],
)
def test_an_intent_is_for_one_request(stage, ask, kind, intents, method, path, content):
    script = Script(MADE)
    with stage.plays(script) as url, client(kind, intents=intents) as asking:
        asking.ask("POST", url + "/a", content=b"1", headers=intents.headers("invoice-7"))
        with pytest.raises(IdempotencyConflictError, match="invoice-7"):
            asking.ask(method, url + path, content=content, headers=intents.headers("invoice-7"))
    assert len(script.seen) == 1


def test_an_intent_follows_its_request_elsewhere(ask, intents):
    script = Script(answer(307, location="/v2"), answer(503), MADE)
    options = {"intents": intents, "world": Metronome()}
    got = ask(script, headers=intents.headers("invoice-7"), options=options)
    assert got.status == 201
    assert len(set(script.keys)) == 1
    assert intents.unanswered() == []


def test_an_intent_that_was_only_sent_elsewhere_is_not_answered(ask, intents):
    script = Script(answer(307, location="/v2"), answer(500))
    ask(script, headers=intents.headers("invoice-7"), options={"intents": intents})
    assert [each.name for each in intents.unanswered()] == ["invoice-7"]


def test_an_intent_needs_a_body_that_can_be_sent_again(ask, intents):
    script = Script(MADE)
    with pytest.raises(SettingsError, match="give it as bytes"):
        ask(
            script,
            content=iter([b"a"]),
            headers=intents.headers("invoice-7"),
            options={"intents": intents},
        )
    assert script.seen == []


def test_a_file_of_intents_that_is_gone_stops_the_request_and_not_the_answer(
    stage, ask, kind, intents, tmp_path
):
    async def delete(seen, send):
        for path in tmp_path.glob("keys.db*"):
            path.unlink()
        intents.close()
        await MADE(seen, send)

    script = Script(delete)
    header = intents.headers("invoice-7")
    with stage.plays(script) as url, client(kind, intents=intents) as asking:
        assert asking.ask("POST", url, headers=header).status == 201
        with pytest.raises(StoreUnavailableError):
            asking.ask("POST", url, headers=header)
    assert len(script.seen) == 1


def test_a_request_without_an_intent_has_no_need_of_the_file(ask, intents, tmp_path):
    intents.close()
    for path in tmp_path.glob("keys.db*"):
        path.unlink()
    assert ask(Script(MADE), options={"intents": intents}).status == 201


# --- life in a process --------------------------------------------------------------------------


async def test_a_request_that_is_cancelled_in_its_pause_is_not_sent_again(stage):
    class Stuck(Metronome):
        async def sleep(self, seconds):
            await super().sleep(seconds)
            paused.set()
            await asyncio.Event().wait()

    paused, script = asyncio.Event(), Script(RUNNING, MADE)
    with stage.plays(script) as url:
        transport = AsyncIdempotentTransport(world=Stuck())
        async with httpx.AsyncClient(transport=transport) as asking:
            task = asyncio.create_task(asking.post(url))
            await paused.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert len(script.seen) == 1


async def test_a_pause_of_one_request_does_not_hold_up_the_others(stage):
    script = Script(answer(503, retry_after=1), MADE, MADE)
    with stage.plays(script) as url:
        async with httpx.AsyncClient(transport=AsyncIdempotentTransport()) as asking:
            first = asyncio.create_task(asking.post(url))
            while not script.seen:
                await asyncio.sleep(0.01)
            assert (await asking.post(url)).status_code == 201
            assert not first.done()
            assert (await first).status_code == 201


def test_a_session_can_be_pickled(stage, tmp_path):
    with Intents(tmp_path / "keys.db") as intents:
        header = intents.headers("invoice-7")
        session = requests.Session()
        session.mount("http://", IdempotentAdapter(intents=intents, patience=Patience(tries=2)))
        again = pickle.loads(pickle.dumps(session))
        script = Script(MADE)
        with stage.plays(script) as url, again:
            assert again.post(url, headers=header, timeout=5).status_code == 201
        assert script.keys == [header["Idempotency-Key"]]
        assert intents.unanswered() == []
        assert again.get_adapter("http://x")._sender.patience.tries == 2


@pytest.mark.parametrize("library", ["httpx", "requests"])
def test_a_library_that_is_missing_is_named(library):
    code = (
        f"import sys; sys.modules['{library}'] = None\n"
        f"try:\n import semel.client.{library}\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("SettingsError")
    assert f"pip install 'semel[{library}]'" in said.stdout


def test_who_is_told_that_it_is_being_worked_on_asks_until_it_is_done(ask, world):
    script = Script(*[RUNNING] * 9, MADE)
    assert ask(script, options={"world": world}).status == 201
    assert world.slept == [2] * 9
    assert len(script.seen) == 10
