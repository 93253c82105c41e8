"""Both runners of the feed's client against a server that cuts, dribbles and says nothing."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time

import anyio
import httpx
import pytest

from semel.client.feed import FeedError, Update, feed
from semel.client.feed_rules import parsed
from semel.errors import SettingsError
from support.client_kinds import Metronome
from support.client_server import TLS
from support.feed_server import CHUNKED, HEAD, PLAIN, Raw, answers, holds, sends, serves
from support.feed_vectors import Server, cases, cursor_of, frame, hello, shown
from support.process import HOST, free_port

ENTRIES = [frame("message", {"n": n}, n) for n in (1, 2, 3)]
END = frame("end", {"position": cursor_of(3)}, 3)
WHOLE = PLAIN + hello(0, 3) + b"".join(ENTRIES) + END
ALL = [{"update": n} for n in (1, 2, 3)]

# A wait that ends at once takes far less, and one that does not is noticed.
AT_ONCE_S = 5.0


class Sync:
    def follow(self, url, *, take=None, **options):
        got = []
        with feed(url, **options) as events:
            for event in events:
                got.append(shown(event))
                if len(got) == take:
                    break
        return got

    def client(self, **options):
        return httpx.Client(trust_env=False, **options)

    def state(self, url, **options):
        with feed(url, **options) as events:
            return events.state()

    def state_after(self, url, **options):
        with feed(url, **options) as events:
            list(events)
            return events.state()


class Async:
    def follow(self, url, *, take=None, **options):
        async def main():
            got = []
            async with feed(url, **options) as events:
                async for event in events:
                    got.append(shown(event))
                    if len(got) == take:
                        break
            return got

        return asyncio.run(main())

    def client(self, **options):
        return httpx.AsyncClient(trust_env=False, **options)

    def state(self, url, **options):
        async def main():
            async with feed(url, **options) as events:
                return await events.state()

        return asyncio.run(main())

    def state_after(self, url, **options):
        async def main():
            async with feed(url, **options) as events:
                await _all(events)
                return await events.state()

        return asyncio.run(main())


@pytest.fixture(params=[Sync, Async])
def runner(request):
    return request.param()


@pytest.fixture
def world():
    return Metronome()


# --- cuts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", [PLAIN, CHUNKED], ids=["plain", "chunked"])
def test_a_feed_that_is_cut_anywhere_is_handed_over_whole(runner, framing, world):
    case = cases("every_cut")[1]
    served = Server(case)
    length = len(framing) + len(served.answer(None))
    cuts = range(0, length + 30, 9 if framing is PLAIN else 11)
    for cut in cuts:
        with Raw(serves(served.answer, cut, cut // 2, framing=framing)) as server:
            assert runner.follow(server.url, world=world) == case["delivered"], cut


def test_a_feed_that_comes_one_byte_at_a_time_is_handed_over_whole(runner, world):
    with Raw(sends(WHOLE, size=1)) as server:
        assert runner.follow(server.url, world=world) == ALL
    assert world.slept == []


def test_a_hole_is_asked_for_at_once(runner, world):
    holed = PLAIN + hello(0, 3) + ENTRIES[0] + ENTRIES[2] + END
    with Raw(sends(holed), sends(PLAIN + hello(1, 3) + b"".join(ENTRIES[1:]) + END)) as server:
        assert runner.follow(server.url, world=world) == ALL
    assert server.cursors == [None, cursor_of(1)]
    assert world.slept == []


def test_a_reset_is_handed_over_with_its_state(runner, world):
    told = {"reason": "trimmed", "position": cursor_of(2), "state": {"n": 2}}
    reset = frame("reset", told, 2)
    with Raw(sends(PLAIN + hello(9, 3) + reset + ENTRIES[2] + END)) as server:
        got = runner.follow(server.url, after=cursor_of(9), world=world)
    assert server.cursors == [cursor_of(9)]
    assert got == [
        {"reset": {"id": cursor_of(2), "state": {"n": 2}, "reason": "trimmed"}},
        {"update": 3},
    ]


def test_the_cursor_is_behind_what_was_handed_over_and_goes_on_elsewhere(world):
    with Raw(sends(WHOLE)) as server:
        with feed(server.url, world=world) as events:
            assert events.cursor is None
            assert next(events).id == cursor_of(1)
            assert events.cursor == cursor_of(1)  # though more has come
            kept = events.cursor
        with feed(server.url, after=kept, world=world) as events:
            assert [event.position.offset for event in events] == [2, 3]
            assert events.cursor == cursor_of(3)


# --- silence ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [holds(), holds(HEAD), holds(PLAIN + hello(0, 0)), holds(PLAIN + hello(0, 3) + b"data: ")],
    ids=["no answer", "half a head", "no event", "half an event"],
)
def test_a_server_that_falls_silent_is_left(runner, world, first):
    with Raw(first, sends(WHOLE)) as server:
        assert runner.follow(server.url, silence_s=0.15, world=world) == ALL
        assert server.ended.acquire(timeout=AT_ONCE_S)
    assert world.slept  # once, or more often: a busy machine may fall silent, too


def test_a_head_that_comes_byte_by_byte_is_not_waited_for_for_ever(runner, world):
    left = threading.Event()

    def dribbles(server, connection, asked):
        for _ in range(1000):
            try:
                connection.sendall(b"x")
            except OSError:
                left.set()
                return
            time.sleep(0.01)

    with Raw(dribbles, sends(WHOLE)) as server:
        assert runner.follow(server.url, silence_s=0.2, world=world) == ALL
        assert left.wait(AT_ONCE_S)  # by the client, and not because it was over


def test_an_event_that_the_server_forgot_is_asked_for(runner, world):
    with Raw(holds(PLAIN + hello(0, 3) + ENTRIES[0]), sends(WHOLE)) as server:
        assert runner.follow(server.url, grace_s=0.15, world=world) == ALL
        assert server.ended.acquire(timeout=AT_ONCE_S)
    assert server.cursors[:2] == [None, cursor_of(1)]


# --- answers ------------------------------------------------------------------------------------


def test_a_server_that_says_when_is_asked_then(runner, world):
    with Raw(answers(503, headers={"Retry-After": "7"}), answers(500), sends(WHOLE)) as server:
        assert runner.follow(server.url, world=world) == ALL
    assert world.slept == [7.5, 0.75]


def test_a_feed_that_has_ended_is_over(runner, world):
    with Raw(answers(204)) as server:
        assert runner.follow(server.url, after=cursor_of(3), world=world) == []
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_refusal_is_an_error_that_says_why(runner, world, status):
    document = {"type": "urn:semel:problem:x", "title": "No", "status": status, "detail": "Why."}
    with Raw(answers(status, document)) as server, pytest.raises(FeedError, match="Why") as caught:
        runner.follow(server.url, world=world)
    assert (caught.value.status, caught.value.detail) == (status, "Why.")
    assert len(server.asked) == 1


def test_a_page_is_no_feed(runner, world):
    page = answers(200, b"<p>" + b"x" * 200_000, kind="text/html")
    with Raw(page) as server, pytest.raises(FeedError, match="text/html") as caught:
        runner.follow(server.url, world=world)
    assert caught.value.status == 200


def test_an_event_that_is_too_large_says_what_to_do(runner, world):
    large = sends(PLAIN + b"data: " + b"x" * 5000)
    with Raw(large) as server, pytest.raises(FeedError, match="limit="):
        runner.follow(server.url, limit=1000, world=world)


def test_after_an_error_there_is_nothing_more(world):
    with Raw(answers(404)) as server, feed(server.url, world=world) as events:
        with pytest.raises(FeedError):
            next(events)
        with pytest.raises(StopIteration):
            next(events)


def test_a_redirect_is_followed(runner, world):
    with (
        Raw(sends(WHOLE)) as other,
        Raw(answers(307, headers={"Location": other.url})) as server,
    ):
        assert runner.follow(server.url, world=world) == ALL


SECRETS = {"Authorization": "Bearer s3cret", "X-Api-Key": "s3cret", "Cookie": "session=s3cret"}


@pytest.mark.parametrize("is_given", [False, True], ids=["own", "given"])
def test_a_redirect_to_another_place_takes_nothing_along_that_was_for_the_first(
    runner, world, is_given
):
    client = None
    if is_given:
        secret = {"X-Other": "s3cret"}
        auth = ("me", "s3cret")
        client = runner.client(
            follow_redirects=True, headers=secret, cookies={"a": "s3cret"}, auth=auth
        )
    with (
        Raw(answers(302, headers={"Location": "/there"}), sends(WHOLE)) as other,
        Raw(answers(307, headers={"Location": other.url})) as server,
    ):
        options = {"client": client, "headers": SECRETS, "after": cursor_of(1), "world": world}
        assert runner.follow(server.url, **options) == ALL[1:]
    assert server.asked[0].headers["x-api-key"] == "s3cret"
    assert [asked.target for asked in other.asked] == ["/feeds/job-1", "/there"]
    for asked in other.asked:
        assert "s3cret" not in str(asked.headers)
        assert asked.headers["last-event-id"] == cursor_of(1)
        assert asked.headers["accept"] == "text/event-stream"


def test_a_redirect_to_the_same_place_takes_everything_along(runner, world):
    with Raw(answers(307, headers={"Location": "/there"}), sends(WHOLE)) as server:
        assert runner.follow(server.url, headers={"X-Api-Key": "s3cret"}, world=world) == ALL
    assert server.asked[1].headers["x-api-key"] == "s3cret"


def test_a_state_is_redirected_in_the_same_way(runner):
    state = answers(200, {"n": 1}, kind="application/json")
    with Raw(state) as other, Raw(answers(307, headers={"Location": other.url})) as server:
        assert runner.state(server.url, headers=SECRETS) == {"n": 1}
    assert "s3cret" not in str(other.asked[0].headers)


def test_a_client_that_follows_no_redirects_is_asked_for_none(runner, world):
    client = runner.client(follow_redirects=False)
    with (
        Raw(sends(WHOLE)) as other,
        Raw(answers(307, headers={"Location": other.url})) as server,
        pytest.raises(FeedError, match="307") as caught,
    ):
        runner.follow(server.url, client=client, world=world)
    assert caught.value.status == 307
    assert other.asked == []


def test_redirects_without_end_are_an_error(runner, world):
    with (
        Raw(answers(302, headers={"Location": "/again"})) as server,
        pytest.raises(FeedError, match="redirect") as caught,
    ):
        runner.follow(server.url, world=world)
    assert caught.value.status == 302
    assert len(server.asked) == 21


def test_after_redirects_without_end_there_is_nothing_more(world):
    again = answers(302, headers={"Location": "/again"})
    with Raw(again) as server, feed(server.url, world=world) as events:
        with pytest.raises(FeedError):
            next(events)
        assert list(events) == []


def test_the_first_failure_in_a_row_is_a_warning_that_says_what_it_was(runner, caplog):
    """The others are not: who waits for a server to come back need not be told each time."""
    caplog.set_level("INFO", "semel")
    late = Raw(answers(503), answers(503), sends(PLAIN), answers(503), sends(WHOLE))
    late.port = free_port()

    class World(Metronome):
        async def sleep(self, seconds):
            await super().sleep(seconds)
            if len(self.slept) == 2:
                late.__enter__()

    runner.follow(f"http://{HOST}:{late.port}/job", world=World())
    late.__exit__()
    told = [(each.levelname, each.getMessage().rpartition("(")[2]) for each in caplog.records]
    assert [each for each in told if each[1].endswith(")")] == [
        ("WARNING", "connection refused)"),
        ("INFO", "connection refused)"),
        ("INFO", "the server answered 503)"),
        ("INFO", "the server answered 503)"),
        ("INFO", "ended)"),
        ("WARNING", "the server answered 503)"),
    ]


def test_nobody_there_is_waited_for(runner):
    late = Raw(sends(WHOLE), port=free_port())

    class World(Metronome):
        async def sleep(self, seconds):
            await super().sleep(seconds)
            if len(self.slept) == 3:
                late.__enter__()

    world = World()
    assert runner.follow(f"http://{HOST}:{late.port}/job", world=world) == ALL
    late.__exit__()
    assert world.slept == [0.75, 1.25, 2.25]


def test_a_certificate_that_is_not_trusted_is_told_at_once(runner, world):
    refused = pytest.raises(httpx.ConnectError, match=r"(?i)certificate")
    with Raw(sends(WHOLE), tls=True) as server, refused:
        runner.follow(server.url, world=world)
    assert world.slept == []


def test_a_scheme_that_nobody_speaks_is_told_at_once(runner, world):
    with pytest.raises(httpx.UnsupportedProtocol):
        runner.follow("gopher://example.test/job", world=world)


# --- what is asked ------------------------------------------------------------------------------


def test_a_request_says_what_is_wanted(runner, world):
    with Raw(serves(lambda cursor: WHOLE[len(PLAIN) :], 250)) as server:
        url = server.url + "?tenant=a%20b"
        runner.follow(url, last_seq=21, headers={"Authorization": "Bearer x"}, world=world)
    first, second = server.asked
    assert first.target == "/feeds/job-1?tenant=a%20b&last_seq=21"
    assert second.target == first.target
    assert "last-event-id" not in first.headers
    assert second.headers["last-event-id"] == cursor_of(1)
    for asked in server.asked:
        assert asked.headers["accept"] == "text/event-stream"
        assert asked.headers["authorization"] == "Bearer x"


def test_a_client_that_is_given_is_used_and_left_open(runner, world):
    client = runner.client(headers={"X-Token": "x"})
    with Raw(sends(WHOLE)) as server:
        assert runner.follow(server.url, client=client, world=world) == ALL
    assert server.asked[0].headers["x-token"] == "x"
    assert not client.is_closed


def test_the_state_is_asked_for_beside_the_feed(runner):
    with Raw(answers(200, {"position": cursor_of(3)}, kind="application/json")) as server:
        assert runner.state(server.url, headers={"X-Token": "x"}) == {"position": cursor_of(3)}
    assert server.asked[0].headers["accept"] == "application/json"
    assert server.asked[0].headers["x-token"] == "x"


def test_a_state_that_is_refused_is_an_error_that_says_why(runner):
    refusal = answers(403, {"title": "No", "detail": "Why."})
    with Raw(refusal) as server, pytest.raises(FeedError, match="Why") as caught:
        runner.state(server.url)
    assert caught.value.status == 403


@pytest.mark.parametrize("is_given", [False, True], ids=["own", "given"])
def test_the_state_is_to_be_had_when_the_loop_has_ended(runner, world, is_given):
    client = runner.client() if is_given else None
    state = answers(200, {"position": cursor_of(3)}, kind="application/json")
    with Raw(sends(WHOLE), state) as server:
        got = runner.state_after(server.url, client=client, world=world)
    assert got == {"position": cursor_of(3)}
    assert client is None or not client.is_closed


# --- ending early -------------------------------------------------------------------------------


def test_leaving_the_loop_hangs_up(runner):
    with Raw(holds(PLAIN + hello(0, 3) + ENTRIES[0])) as server:
        assert runner.follow(server.url, take=1) == [{"update": 1}]
        assert server.ended.acquire(timeout=AT_ONCE_S)


WAITS = {
    "for an answer": holds(),
    "for an event": holds(PLAIN + hello(0, 0)),
    "to connect again": answers(503, headers={"Retry-After": "60"}),
}


@pytest.mark.parametrize("part", WAITS.values(), ids=WAITS)
def test_another_thread_ends_a_loop_that_waits(part):
    with Raw(part) as server:
        events = feed(server.url)
        ended = in_thread(list, events)
        _until(lambda: server.asked)
        time.sleep(0.05)  # so that it waits, mostly; it must end wherever it is
        events.close()
        assert ended() == []
        if part is not WAITS["to connect again"]:
            assert server.ended.acquire(timeout=AT_ONCE_S)


def after_one_answer(asked_again, then):
    """The next request on the same connection is left to `then`."""

    def keeps(server, connection, asked):
        connection.sendall(b"HTTP/1.1 200 -\r\nContent-Length: 0\r\n\r\n")
        connection.recv(10_000)
        asked_again.set()
        then(server, connection, asked)

    return keeps


def test_another_thread_ends_a_loop_that_waits_on_a_connection_that_was_open():
    """A client of one's own may have used it before, so nobody has seen it being made."""
    asked_again = threading.Event()
    with (
        Raw(after_one_answer(asked_again, holds())) as server,
        httpx.Client(trust_env=False) as client,
    ):
        client.get(server.url)
        events = feed(server.url, client=client)
        ended = in_thread(list, events)
        assert asked_again.wait(AT_ONCE_S)
        events.close()
        assert ended() == []
        assert len(server.asked) == 1  # one connection
        assert not client.is_closed


def test_an_answer_that_comes_after_the_loop_has_ended_is_hung_up_on():
    def comes_late(server, connection, asked):
        assert ended_loop.wait(AT_ONCE_S)
        holds(PLAIN + hello(0, 0))(server, connection, asked)

    asked_again, ended_loop = threading.Event(), threading.Event()
    with (
        Raw(after_one_answer(asked_again, comes_late)) as server,
        httpx.Client(trust_env=False) as client,
    ):
        client.get(server.url)
        events = feed(server.url, client=client)
        ended = in_thread(list, events)
        assert asked_again.wait(AT_ONCE_S)
        events.close()
        assert ended() == []
        ended_loop.set()
        assert server.ended.acquire(timeout=AT_ONCE_S)


def test_another_thread_ends_a_loop_over_tls():
    context = ssl.create_default_context(cafile=TLS / "certificate.pem")
    context.check_hostname = False
    with (
        Raw(holds(PLAIN + hello(0, 0)), tls=True) as server,
        httpx.Client(verify=context) as client,
    ):
        events = feed(server.url, client=client)
        ended = in_thread(list, events)
        _until(lambda: server.asked)
        events.close()
        assert ended() == []
        assert server.ended.acquire(timeout=AT_ONCE_S)


def test_another_thread_ends_a_loop_between_two_events():
    with Raw(holds(PLAIN + hello(0, 3) + b"".join(ENTRIES))) as server:
        events = feed(server.url)
        assert next(events) == Update(parsed(cursor_of(1)), {"n": 1})
        in_thread(events.close)()
        assert list(events) == []
        assert server.ended.acquire(timeout=AT_ONCE_S)


@pytest.mark.parametrize("part", WAITS.values(), ids=WAITS)
async def test_another_task_ends_a_loop_that_waits(part):
    with Raw(part) as server:
        events = feed(server.url)
        loop = asyncio.ensure_future(_all(events))
        while not server.asked:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        await events.aclose()
        assert await asyncio.wait_for(loop, AT_ONCE_S) == []


async def _all(events):
    return [event async for event in events]


async def test_a_task_that_is_cancelled_leaves_a_feed_that_goes_on(world):
    with Raw(holds(PLAIN + hello(0, 1) + ENTRIES[0]), sends(WHOLE)) as server:
        async with feed(server.url, world=world) as events:
            assert (await anext(events)).position.offset == 1
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(events), 0.05)
            assert [event.position.offset async for event in events] == [2, 3]
        assert await asyncio.to_thread(server.ended.acquire, timeout=AT_ONCE_S)


# httpx leaves its generators to the collector: asyncio closes them, and trio warns of them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_feed_runs_on_trio_too(world):
    async def main():
        async with feed(server.url, world=world, silence_s=0.2) as events:
            return [shown(event) async for event in events]

    with Raw(holds(PLAIN + hello(0, 0)), sends(WHOLE)) as server:
        assert anyio.run(main, backend="trio") == ALL


def in_thread(work, *arguments):
    """Run it beside us; the answer is a call that waits for it, not long."""
    got = []
    thread = threading.Thread(target=lambda: got.append(work(*arguments)))
    thread.start()

    def answer():
        thread.join(AT_ONCE_S)
        assert not thread.is_alive()
        return got[0]

    return answer


def _until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# --- colours ------------------------------------------------------------------------------------


def test_a_client_of_the_other_colour_is_refused():
    with pytest.raises(SettingsError, match=r"httpx\.AsyncClient is for `async for`"):
        next(feed("http://example.test/job", client=httpx.AsyncClient()))

    async def main():
        with httpx.Client() as client, pytest.raises(SettingsError, match="is for `for`"):
            await anext(feed("http://example.test/job", client=client))

    asyncio.run(main())


async def test_a_feed_keeps_its_colour(world):
    with Raw(sends(WHOLE)) as server:
        async with feed(server.url, world=world) as events:
            await anext(events)
            with pytest.raises(SettingsError, match="followed by async code"):
                next(events)
            with pytest.raises(SettingsError, match="aclose"):
                events.close()


async def test_two_loops_over_one_feed_are_refused():
    with Raw(holds(PLAIN + hello(0, 0))) as server:
        async with feed(server.url) as events:
            first = asyncio.ensure_future(anext(events, None))
            while not server.asked:
                await asyncio.sleep(0.001)
            with pytest.raises(RuntimeError, match="in a loop already"):
                await anext(events)
            await events.aclose()
            assert await first is None
