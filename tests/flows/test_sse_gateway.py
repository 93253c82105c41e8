"""The gateway, spoken to by hand: what is on the wire, who is let in, who is cut off.

In simulated time: whoever is woken next is drawn by lot.
"""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from semel.bus.jobs import stream_of
from semel.entries import Position
from semel.errors import SettingsError, StoreUnavailableError
from semel.http.sse import Gateway, Limits, Tickets, forbidden, unauthorised
from support.feeds import simulated
from support.viewers import JOB, Connection, frames_of, publish

STREAM = stream_of("scan", JOB)
PIPELINE = ("vision", "rule", "answer", "reward", "done")


def told(*numbers):
    """Entries from the first, with these numbers."""
    return list(zip(itertools.count(1), numbers, strict=False))


# --- on the wire --------------------------------------------------------------------------------


@simulated()
async def test_a_job_is_shown_as_it_happens_and_the_connection_ends_with_it(store):
    gateway = Gateway(store)
    await publish(store, "vision")
    viewer = await Connection(gateway).until(lambda c: c.told)
    for stage in PIPELINE[1:]:
        await publish(store, stage)
    reply = await viewer.ended()

    assert reply.status == 200
    assert reply.header("content-type") == "text/event-stream; charset=utf-8"
    assert reply.header("cache-control") == "no-store"
    assert reply.header("x-accel-buffering") == "no"
    assert viewer.told == [*told(10, 20, 30, 40, 50), "end"]
    hello, first, *_, end = viewer.frames
    assert hello.raw.startswith(b"retry: ")
    assert 500 <= int(hello.raw.split(b"\n")[0].removeprefix(b"retry: ")) <= 2500
    assert hello.id.startswith("0.")
    assert first.raw == b"event: message\ndata: %b\nid: %b\n\n" % (
        first.data.encode(),
        first.id.encode(),
    )
    assert first.json()["data"] == {"of": "vision"}
    assert end.json() == {"position": end.id}
    await gateway.aclose()


@simulated()
async def test_who_comes_back_gets_what_it_has_missed_and_nothing_twice(store):
    gateway = Gateway(store)
    await publish(store, "vision", "rule")
    first = await Connection(gateway).until(lambda c: len(c.told) == 2)
    await first.hang_up()
    await publish(store, "answer", "reward")
    by_header = await Connection(gateway, cursor=first.cursor).until(lambda c: len(c.told) == 2)
    by_query = Connection(gateway, query=f"after={first.cursor}".encode())
    both = Connection(gateway, cursor=first.cursor, query=b"after=garbage&last_seq=10")
    await publish(store, "done")
    for again in (by_header, by_query, both):
        await again.ended()
        assert again.told == [(3, 30), (4, 40), (5, 50), "end"]
        assert again.frames[0].id == first.cursor
    await gateway.aclose()


@simulated()
async def test_a_final_cursor_is_answered_204_and_an_older_one_gets_the_rest(store):
    gateway = Gateway(store)
    await publish(store, *PIPELINE)
    viewer = Connection(gateway)
    await viewer.ended()
    again = await Connection(gateway, cursor=viewer.cursor).ended()
    assert (again.status, again.body) == (204, b"")
    behind = Connection(gateway, cursor=viewer.frames[-3].id)
    await behind.ended()
    assert behind.told == [(5, 50), "end"]
    await gateway.aclose()


@simulated(1, 2)
async def test_an_expired_job_is_410_and_204_for_who_has_seen_its_end_and_then_404(store):
    gateway = Gateway(store)
    await publish(store, *PIPELINE)
    viewer = Connection(gateway)
    await viewer.ended()
    await asyncio.sleep(3700)
    for cursor in (None, viewer.frames[1].id, "garbage"):
        reply = await Connection(gateway, cursor=cursor).ended()
        assert (reply.status, reply.problem) == (410, "job-gone")
    assert (await Connection(gateway, cursor=viewer.cursor).ended()).status == 204
    assert (await Connection(gateway, accept="application/json").ended()).status == 410
    await asyncio.sleep(3700)
    reply = await Connection(gateway, cursor=viewer.cursor).ended()
    assert (reply.status, reply.problem) == (404, "job-unknown")
    await gateway.aclose()


@simulated()
async def test_a_job_that_nobody_knows_is_404_or_waited_for(store):
    refusing, waiting = Gateway(store), Gateway(store, unknown="wait")
    reply = await Connection(refusing).ended()
    assert (reply.status, reply.problem) == (404, "job-unknown")
    assert refusing.status().streams == 0
    viewer = await Connection(waiting).until(lambda c: c.frames)
    await publish(store, "vision", "done")
    await viewer.ended()
    assert viewer.told == [*told(10, 50), "end"]
    for gateway in (refusing, waiting):
        await gateway.aclose()


@simulated()
async def test_cursors_that_lead_nowhere_are_told_in_the_stream_with_the_state(store):
    gateway = Gateway(store)
    await publish(store, "vision", "rule", "answer")
    await publish(store, "vision", job_id="8")
    await store.trim(1, STREAM)
    theirs = Connection(gateway, "/8")
    await theirs.until(lambda c: c.told)
    cursors = {
        "9.0123456789ab": "ahead",
        "2.0123456789ab": "forked",
        theirs.cursor: "forked",
        "0.0123456789ab": "trimmed",
        "-1.0123456789ab": "unreadable",
        "01.0123456789ab": "unreadable",
        "2.0123456789AB": "unreadable",
        "99999999999999999999.0123456789ab": "unreadable",
        "\xff\xfe": "unreadable",
        "null": "unreadable",
    }
    for cursor, reason in cursors.items():
        viewer = await Connection(gateway, cursor=cursor).until(lambda c: c.told)
        hello, reset = viewer.frames
        assert hello.id is None  # or who is cut off here would never hear of it
        said = reset.json()
        assert said["reason"] == reason
        assert said["position"] == reset.id == hello.json()["head"]
        assert list(said["state"]["stages"]) == ["vision", "rule", "answer"]
        assert said["state"]["seq"] == 30
        await viewer.hang_up()
    assert gateway.status().resets == {"unreadable": 6, "forked": 2, "ahead": 1, "trimmed": 1}
    await theirs.hang_up()
    await gateway.aclose()


@simulated()
async def test_behind_a_reset_it_goes_on(store):
    gateway = Gateway(store)
    await publish(store, "vision", "rule")
    viewer = await Connection(gateway, cursor="garbage").until(lambda c: c.told)
    await publish(store, "answer", "done")
    await viewer.ended()
    assert viewer.told == ["reset", (3, 30), (4, 50), "end"]
    await gateway.aclose()


@simulated(*range(4))
async def test_a_failover_that_lost_events_is_told_to_everybody_and_cuts_nobody_off(store):
    gateway = Gateway(store)
    await publish(store, "vision", "rule")
    replica = store.copied()
    viewers = [Connection(gateway) for _ in range(3)]
    await publish(store, "answer")
    for viewer in viewers:
        await viewer.until(lambda c: len(c.told) == 3)
    store.fail_over(replica)
    await publish(store, "reward")
    for viewer in viewers:
        await viewer.until(lambda c: "reset" in c.told)
    await publish(store, "done")
    for viewer in viewers:
        await viewer.ended()
        assert viewer.told == [*told(10, 20, 30), "reset", (4, 50), "end"]
        assert viewer.frames[4].json()["reason"] == "forked"
        assert "answer" not in viewer.frames[4].json()["state"]["stages"]
    await gateway.aclose()


@simulated()
async def test_signs_of_life_say_where_it_ends_and_move_no_cursor(store):
    gateway = Gateway(store, heartbeat_s=15)
    await publish(store, "vision")
    viewer = await Connection(gateway).until(lambda c: c.told)
    await asyncio.sleep(70)
    beats = [frame for frame in viewer.frames if frame.event == "head"]
    assert 3 <= len(beats) <= 5
    assert {(beat.id, beat.json()["head"]) for beat in beats} == {(None, viewer.cursor)}
    await viewer.hang_up()
    await gateway.aclose()


@simulated()
async def test_a_connection_gets_so_old_and_no_older_and_its_heir_misses_nothing(store):
    gateway = Gateway(store, max_age_s=600)
    await publish(store, "vision")
    viewers = [await Connection(gateway).opened() for _ in range(10)]
    begun = asyncio.get_running_loop().time()
    ended = []
    for viewer in viewers:
        viewer.task.add_done_callback(
            lambda _: ended.append(asyncio.get_running_loop().time() - begun)
        )
    await asyncio.sleep(700)
    assert len(ended) == 10
    assert 475 <= min(ended) < max(ended) <= 602
    assert len({round(age) for age in ended}) > 3  # not all together
    assert all(viewer.over for viewer in viewers)  # between two frames
    assert gateway.status().closed == {"old": 10}
    await publish(store, "rule")
    heirs = [Connection(gateway, cursor=viewer.cursor) for viewer in viewers]
    for viewer, heir in zip(viewers, heirs, strict=True):
        await heir.until(lambda c: c.told)
        assert viewer.told + heir.told == told(10, 20)
        await heir.hang_up()
    await gateway.aclose()


@simulated()
async def test_data_with_line_ends_comes_as_several_lines(store):
    gateway = Gateway(store)
    await store.append('{"seq":\n1,\r\n"x":\r2}', STREAM, id="odd")
    viewer = await Connection(gateway).until(lambda c: c.told)
    assert viewer.frames[1].raw.startswith(
        b'event: message\ndata: {"seq":\ndata: 1,\ndata: "x":\ndata: 2}\nid: 1.'
    )
    assert viewer.frames[1].json() == {"seq": 1, "x": 2}
    await viewer.hang_up()
    await gateway.aclose()


@simulated()
async def test_by_its_number_it_goes_on_behind_that_event_wherever_that_is(store):
    gateway = Gateway(store)
    publishing = [("rule", 0), ("vision", 0), ("rule", 1), ("vision", 1)]
    for stage, sub_seq in publishing:
        await publish(store, stage, sub_seq=sub_seq)  # 20, 10, 21, 11
    expected = {
        b"last_seq=20": [(2, 10), (3, 21), (4, 11)],
        b"last_seq=21": [(4, 11)],
        b"last_seq=0": told(20, 10, 21, 11),
        b"last_seq=15": [(1, 20), (3, 21)],
        b"last_seq=99999999999": ["reset"],
        b"last_seq=x": ["reset"],
    }
    for query, shown in expected.items():
        viewer = await Connection(gateway, query=query).until(lambda c: c.told)
        await viewer.until(lambda c, shown=shown: len(c.told) == len(shown))
        assert viewer.told == shown, query
        await viewer.hang_up()
    filtered = await Connection(gateway, query=b"last_seq=15").until(lambda c: len(c.frames) == 5)
    assert filtered.cursor.startswith("4.")  # what is not shown moves the cursor, too
    await filtered.hang_up()
    await gateway.aclose()


# --- the state, and other methods ---------------------------------------------------------------


@simulated()
async def test_without_asking_for_a_stream_one_gets_the_state(store):
    gateway = Gateway(store)
    await publish(store, "vision", "rule")
    reply = await Connection(gateway, accept="application/json").ended()
    assert (reply.status, reply.header("content-type")) == (200, "application/json")
    assert reply.json()["stage"] == "rule"
    assert list(reply.json()["stages"]) == ["vision", "rule"]
    tag = reply.header("etag").encode()
    same = await Connection(gateway, accept="*/*", headers=[(b"if-none-match", tag)]).ended()
    assert (same.status, same.body) == (304, b"")
    await publish(store, "done")
    changed = await Connection(gateway, accept="*/*", headers=[(b"if-none-match", tag)]).ended()
    assert (changed.status, changed.json()["life"]) == (200, "ended")
    await gateway.aclose()


@simulated(1)
async def test_other_methods(store):
    gateway = Gateway(store, cors=["https://app.example"], credentials=True)
    await publish(store, "vision")
    for accept in ("text/event-stream", "application/json"):
        reply = await Connection(gateway, method="HEAD", accept=accept).ended()
        assert (reply.status, reply.body) == (200, b"")
    reply = await Connection(gateway, method="POST").ended()
    assert (reply.status, reply.problem) == (405, "method-not-allowed")
    assert reply.header("allow") == "GET, HEAD, OPTIONS"

    origin = (b"origin", b"https://app.example")
    asks = [origin, (b"access-control-request-method", b"GET")]
    reply = await Connection(gateway, method="OPTIONS", headers=asks).ended()
    assert (reply.status, reply.body) == (204, b"")
    assert reply.header("access-control-allow-origin") == "https://app.example"
    assert reply.header("access-control-allow-credentials") == "true"
    assert "Last-Event-ID" in reply.header("access-control-allow-headers")
    viewer = await Connection(gateway, headers=[origin]).opened()
    await viewer.hang_up()
    head = dict(viewer.sent[0]["headers"])
    assert head[b"access-control-allow-origin"] == b"https://app.example"
    stranger = Connection(gateway, "/8", headers=[(b"origin", b"https://evil.example")])
    assert (await stranger.ended()).header("access-control-allow-origin") is None
    await gateway.aclose()


def test_cookies_for_every_origin_are_refused(tmp_path):
    with pytest.raises(SettingsError, match="name the origins"):
        Gateway(f"sqlite:///{tmp_path}/log.db", cors="*", credentials=True)


@pytest.mark.parametrize("base", ["jobs", "/jobs/", "/"])
def test_a_base_that_is_no_path_is_refused(base, tmp_path):
    with pytest.raises(SettingsError, match="a path as in"):
        Gateway(f"sqlite:///{tmp_path}/log.db", base=base)


@simulated(1)
async def test_a_job_may_have_any_name(store):
    gateway = Gateway(store, base="/jobs")
    names = {"a/b": "a%2Fb", "ü 1": "%C3%BC%201", "..": "..", "a%2Fb": "a%252Fb"}
    for name, path in names.items():
        await publish(store, "vision", job_id=name)
        reply = await Connection(gateway, f"/jobs/{path}", accept="*/*").ended()
        assert reply.json()["job_id"] == name
    for path in ("", "/", "/a/b", "/%ff", "/%00", "/" + 300 * "a", "2/a"):
        reply = await Connection(gateway, f"/jobs{path}").ended()
        assert (reply.status, reply.problem) == (404, "job-unknown"), path
    await gateway.aclose()


# --- who may see what ---------------------------------------------------------------------------


def by_cookie(request, job_id):
    """The cookie is the user; what belongs to others is forbidden to them."""
    user = request.header("cookie")
    if user is None:
        raise unauthorised()
    if user == "mallory":
        raise forbidden()
    return user


def cookie(user):
    return [(b"cookie", user.encode())]


@simulated(1)
async def test_who_may_not_see_it_is_told_so_on_every_way(store):
    async def later(request, job_id):
        await asyncio.sleep(0.01)
        return by_cookie(request, job_id)

    await publish(store, "vision")
    for authorise in (by_cookie, later, lambda *_: None, lambda *_: False):
        gateway = Gateway(store, authorise=authorise)
        for accept, cursor in itertools.product(("text/event-stream", "*/*"), (None, "1.x")):
            reply = await Connection(
                gateway, accept=accept, cursor=cursor, headers=cookie("mallory")
            ).ended()
            assert (reply.status, reply.problem) == (403, "forbidden")
        nobody = await Connection(gateway).ended()
        assert nobody.status in {401, 403}
        assert gateway.status().streams == 0
        await gateway.aclose()


@simulated(1)
async def test_authorise_reads_the_request_by_the_names_of_starlette(store):
    seen = []

    def authorise(request, job_id):
        seen.append((request.path_params["job_id"], request.url.path, request.method))
        return request.cookies["user"]

    gateway = Gateway(store, authorise=authorise)
    await publish(store, *PIPELINE)
    assert (await Connection(gateway).ended()).status == 403, "the client has sent no cookie"
    viewer = Connection(gateway, headers=[(b"cookie", b"user=ann")])
    assert (await viewer.ended()).status == 200
    assert seen == [(JOB, f"/{JOB}", "GET")] * 2
    await gateway.aclose()


@simulated(1)
async def test_generator_function_as_authorise_refuses_the_viewer(store):
    async def later(request, job_id):
        yield "ada"

    def now(request, job_id):
        yield "ada"

    for authorise in (later, now):
        gateway = Gateway(store, authorise=authorise)
        assert (await Connection(gateway).ended()).status == 403
        await gateway.aclose()


class NoTruth:
    """As an array of numpy, or a condition of SQLAlchemy."""

    def __bool__(self):
        raise ValueError("the truth value is ambiguous")


@pytest.mark.parametrize("answer", [None, False, "", 0, 0.0, b"", {}, [], (), set()], ids=repr)
@simulated(1)
async def test_every_falsy_answer_of_authorise_refuses_the_viewer(store, answer):
    async def later(request, job_id):
        return answer

    await publish(store, "vision")
    for authorise in (lambda *_: answer, later):
        gateway = Gateway(store, authorise=authorise)
        for accept in ("text/event-stream", "*/*"):
            reply = await Connection(gateway, accept=accept).ended()
            assert (reply.status, reply.problem) == (403, "forbidden")
        await gateway.aclose()


async def _user():
    return None


UNDECIDED = {
    "a coroutine": lambda *_: _user(),
    "a future": lambda *_: asyncio.get_running_loop().create_future(),
    "a returned refusal": lambda *_: unauthorised(),
    "a returned error": lambda *_: PermissionError("no"),
    "a returned exit": lambda *_: SystemExit(1),
    "NotImplemented": lambda *_: NotImplemented,
}


@pytest.mark.parametrize("undecided", UNDECIDED.values(), ids=UNDECIDED)
@pytest.mark.filterwarnings("error")
@simulated(1)
async def test_answer_of_authorise_that_decides_nothing_refuses_the_viewer(store, undecided):
    async def later(request, job_id):
        return undecided()

    await publish(store, "vision")
    gateway = Gateway(store, authorise=later)
    for accept in ("text/event-stream", "*/*"):
        reply = await Connection(gateway, accept=accept).ended()
        assert (reply.status, reply.problem) == (403, "forbidden")
    await gateway.aclose()


@simulated(1)
async def test_an_empty_cookie_is_no_principal(store):
    await publish(store, "vision")
    gateway = Gateway(store, authorise=lambda request, job_id: request.cookie("user"))
    for sent in ("user=", 'user=""', "user", "", "user=; user=ann"):
        reply = await Connection(gateway, accept="*/*", headers=cookie(sent)).ended()
        assert reply.status == 403, sent
    assert (
        await Connection(gateway, accept="*/*", headers=cookie("user=ann")).ended()
    ).status == 200
    await gateway.aclose()


@pytest.mark.parametrize("answer", [True, "ann", 7, {"id": 7}, Ellipsis], ids=repr)
@simulated(1)
async def test_true_and_every_principal_that_is_not_empty_let_the_viewer_in(store, answer):
    await publish(store, "vision")
    gateway = Gateway(store, authorise=lambda *_: answer)
    assert (await Connection(gateway, accept="*/*").ended()).status == 200
    await gateway.aclose()


@simulated()
async def test_an_empty_answer_while_connected_ends_the_stream(store):
    answers = iter(["bob"])
    gateway = Gateway(store, authorise=lambda *_: next(answers, ""), reauthorise_s=5)
    await publish(store, "vision")
    await Connection(gateway).ended()
    assert gateway.status().closed == {"refused": 1}
    await gateway.aclose()


@simulated()
async def test_an_empty_answer_to_a_good_ticket_refuses_the_viewer(store):
    tickets = Tickets(store)
    gateway = Gateway(store, authorise=lambda request, _: request.ticket and "", tickets=tickets)
    await publish(store, "vision")
    ticket = await tickets.issue("ann", "7")
    reply = await Connection(gateway, query=f"ticket={ticket}".encode()).ended()
    assert reply.status == 403
    await gateway.aclose()


def _raising(request, job_id):
    raise ZeroDivisionError


@pytest.mark.parametrize("authorise", [_raising, lambda *_: NoTruth()], ids=["raises", "no truth"])
@simulated(1)
async def test_authorise_that_fails_is_a_503_and_logged_once_a_minute(store, authorise, caplog):
    await publish(store, "vision")
    answers = iter(["bob"])
    gateway = Gateway(store, authorise=authorise)
    for _ in range(20):
        reply = await Connection(gateway).ended()
        assert (reply.status, reply.problem) == (503, "undecided")
    again = Gateway(
        store, authorise=lambda *call: next(answers, None) or authorise(*call), reauthorise_s=5
    )
    await Connection(again).ended()
    assert again.status().closed == {"refused": 1}
    assert len([each for each in caplog.records if "authorise failed" in each.message]) == 2
    for each in (gateway, again):
        await each.aclose()


@simulated()
async def test_who_loses_access_is_cut_off_while_connected_and_not_let_in_again(store):
    allowed = {"alice", "bob"}

    def authorise(request, job_id):
        user = request.header("cookie")
        return user if user in allowed else None

    gateway = Gateway(store, authorise=authorise, reauthorise_s=30)
    await publish(store, "vision")
    alice, bob = (Connection(gateway, headers=cookie(user)) for user in ("alice", "bob"))
    for viewer in (alice, bob):
        await viewer.until(lambda c: c.told)
    allowed.discard("bob")
    await asyncio.sleep(35)
    await bob.ended()
    await publish(store, "rule")
    await alice.until(lambda c: len(c.told) == 2)
    assert bob.told == told(10)
    assert gateway.status().closed == {"refused": 1}
    reply = await Connection(gateway, cursor=bob.cursor, headers=cookie("bob")).ended()
    assert reply.status == 403
    await alice.hang_up()
    await gateway.aclose()


@pytest.mark.parametrize("error", [OSError("no users"), StoreUnavailableError("no users")])
@simulated()
async def test_whoever_cannot_be_asked_about_any_more_is_shown_nothing_more(store, error):
    asked = []

    def authorise(request, job_id):
        asked.append(job_id)
        if len(asked) > 1:
            raise error
        return "alice"

    gateway = Gateway(store, authorise=authorise, reauthorise_s=5)
    await publish(store, "vision")
    alice = await Connection(gateway).until(lambda c: c.told)
    await alice.ended()
    assert (alice.status, len(asked)) == (200, 2)
    assert gateway.status().closed == {"refused": 1}
    await gateway.aclose()


@simulated()
async def test_access_is_checked_again_also_while_there_is_no_end_of_events(store):
    allowed = {"bob"}
    gateway = Gateway(store, authorise=lambda *_: "bob" if allowed else None, reauthorise_s=5)
    await publish(store, "vision")
    bob = await Connection(gateway).until(lambda c: c.told)
    allowed.clear()
    for n in range(1000):
        await store.append(f'{{"seq":{n}}}', STREAM)
        await asyncio.sleep(0.01)
        if bob.over:
            break
    assert bob.over
    await gateway.aclose()


@simulated()
async def test_who_is_always_behind_is_checked_and_gets_old_all_the_same(store):
    allowed = {"bob"}
    for n in range(900):
        await store.append(json.dumps({"seq": n, "text": "x" * 4000}), STREAM, id=str(n))

    def watched(**terms):
        gateway = Gateway(store, authorise=lambda *_: "bob" if allowed else None, **terms)
        bob = Connection(gateway)
        bob.pace_s = 0.9  # for each write: a whole page takes long
        return gateway, bob

    (strict, refused), (rotating, old) = watched(reauthorise_s=3), watched(max_age_s=4)
    await asyncio.sleep(2)
    allowed.clear()
    for bob in (refused, old):
        await bob.ended()
        assert 0 < len(bob.told) < 900
    assert (strict.status().closed, rotating.status().closed) == ({"refused": 1}, {"old": 1})
    for gateway in (strict, rotating):
        await gateway.aclose()


@simulated()
async def test_what_comes_while_somebody_is_refused_is_not_shown_any_more(store):
    async def authorise(request, job_id):
        asked.append(job_id)
        if len(asked) > 1:
            await publish(store, "rule")
            await asyncio.sleep(0.1)
            return None
        return "bob"

    asked = []
    gateway = Gateway(store, authorise=authorise, reauthorise_s=5)
    await publish(store, "vision")
    bob = await Connection(gateway).until(lambda c: c.told)
    await bob.ended()
    assert (bob.told, len(asked)) == (told(10), 2)
    await gateway.aclose()


@simulated()
async def test_who_never_says_whether_somebody_may_holds_up_nothing(store):
    """Asked at first, or again; and neither does a store that never answers hold up a drain."""

    async def authorise(request, job_id):
        asked.append(job_id)
        if len(asked) != 1:
            await asyncio.Event().wait()
        return "bob"

    asked = []
    await publish(store, "vision")
    gateway = Gateway(store, authorise=authorise, reauthorise_s=5)
    first = await Connection(gateway).until(lambda c: c.told)
    reply = await Connection(gateway).ended()
    assert (reply.status, reply.problem) == (503, "undecided")
    await first.ended()
    assert gateway.status().closed == {"refused": 1}

    asked.clear()
    again = Gateway(store, authorise=authorise, reauthorise_s=5)
    second = await Connection(again).until(lambda c: c.told)
    behind = Connection(again, cursor="garbage")
    await second.until(lambda c: len(asked) == 3)
    begun = asyncio.get_running_loop().time()
    await again.drain(within_s=1)
    assert asyncio.get_running_loop().time() - begun <= 2.5
    for gone in (second, behind):
        await asyncio.wait([gone.task])
    assert again.status().connections == 0
    for each in (gateway, again):
        await each.aclose()


@simulated()
async def test_an_outage_within_project_is_no_hole(store):
    """It ends the connection, as any other error there: nothing was passed over."""
    failing = []

    def project(event, principal):
        if event["seq"] == 300 and not failing:
            failing.append(event)
            raise StoreUnavailableError("no users")
        return event

    await store.fill((f'{{"seq":{n}}}' for n in range(1, 601)), STREAM)
    gateway = Gateway(store, project=project)
    viewer = Connection(gateway)
    await viewer.ended()
    assert viewer.told[-1] == "error"
    heir = Connection(gateway, cursor=viewer.cursor)
    await heir.until(lambda c: c.told and c.told[-1][1] == 600)
    assert [seq for _, seq in viewer.told[:-1] + heir.told] == [*range(1, 601)]
    await heir.hang_up()
    await gateway.aclose()


@simulated()
async def test_behind_a_reset_the_number_that_it_began_with_hides_nothing(store):
    gateway = Gateway(store)
    await publish(store, "vision", "rule")
    viewer = Connection(gateway, query=b"last_seq=45")
    await viewer.until(lambda c: c.frames)
    replica = store.copied()
    await publish(store, "answer")
    await viewer.until(lambda c: c.cursor.startswith("3."))
    store.fail_over(replica)
    await viewer.until(lambda c: "reset" in c.told)
    await store.append('{"seq":30}', STREAM)
    await viewer.until(lambda c: c.told[-1] == (3, 30))
    await viewer.hang_up()
    await gateway.aclose()


def only_own(event, principal):
    """Numbers go to everybody; secrets to whom they belong; of `hidden` nothing is shown at all."""
    if "hidden" in event["data"]:
        return None
    if event["data"].get("for") not in (None, principal):
        event["data"]["secret"] = "-"
    return event


@simulated(*range(6))
async def test_nobody_is_shown_what_is_not_theirs_live_replayed_or_in_the_state(store):
    gateway = Gateway(store, authorise=by_cookie, project=only_own)
    secrets = {user: f"secret-of-{user}" for user in ("alice", "bob")}
    await publish(store, "vision")
    live = {user: Connection(gateway, headers=cookie(user)) for user in secrets}
    for user, secret in secrets.items():
        await publish(store, "rule", data={"for": user, "secret": secret}, sub_seq=len(user))
        await publish(store, "answer", data={"hidden": secret}, sub_seq=len(user))
        await asyncio.sleep(0.05)
    await publish(store, "reward", data={"for": "bob", "secret": secrets["bob"]})
    for viewer in live.values():
        await viewer.until(lambda c: (c.cursor or "").startswith("6."))

    shown = []
    for user, viewer in live.items():
        bodies = {viewer.so_far}
        replayed = Connection(gateway, headers=cookie(user))
        await replayed.until(lambda c: (c.cursor or "").startswith("6."))
        assert _entries(replayed) == _entries(viewer)  # to the byte
        bodies.add(replayed.so_far)
        for cursor in ("garbage", viewer.frames[2].id):
            again = Connection(gateway, cursor=cursor, headers=cookie(user))
            await again.until(lambda c: (c.cursor or "").startswith("6."))
            bodies.add(again.so_far)
            assert _entries(viewer).endswith(_entries(again))
            await again.hang_up()
        state = await Connection(gateway, accept="*/*", headers=cookie(user)).ended()
        bodies.add(state.body)
        for other in secrets.keys() - {user}:
            assert not any(secrets[other].encode() in body for body in bodies)
        assert "answer" not in state.json()["stages"]
        assert sum(secrets[user].encode() in body for body in bodies) >= 2
        assert not any(b"hidden" in body for body in bodies)
        shown.append(state.json()["stages"]["reward"]["data"]["secret"])
        await replayed.hang_up()
        await viewer.hang_up()
    assert shown == ["-", secrets["bob"]]
    await gateway.aclose()


def _entries(viewer):
    """What it was shown, without hellos, resets and signs of life."""
    shown = (frame for frame in viewer.frames if frame.event in {"message", "head"})
    return b"".join(frame.raw for frame in shown if frame.id is not None)


@simulated(1)
async def test_a_projection_that_fails_shows_nothing_and_ends_the_connection(store):
    def broken(event, principal):
        if event["stage"] == "rule":
            raise RuntimeError("a defect")
        return event

    gateway = Gateway(store, project=broken)
    await publish(store, "vision")
    viewer = await Connection(gateway).until(lambda c: c.told)
    await publish(store, "rule")
    await viewer.ended()
    assert viewer.told == [*told(10), "error"]
    assert viewer.frames[-1].json() == {"reason": "failed"}
    assert (viewer.frames[-1].id, gateway.status().connections) == (None, 0)
    assert gateway.status().closed == {"failed": 1}
    await gateway.aclose()


@simulated(1)
async def test_project_that_raises_ends_the_stream_and_is_logged_once_a_minute(store, caplog):
    """Live events, replayed events, a reset and the state fail, for this viewer only."""

    def project(event, principal):
        if principal == "bob" and event["stage"] == "rule":
            raise RuntimeError("a defect")
        return event

    gateway = Gateway(store, authorise=by_cookie, project=project)
    await publish(store, "vision")
    live = await Connection(gateway, headers=cookie("bob")).until(lambda c: c.told)
    other = await Connection(gateway, headers=cookie("alice")).until(lambda c: c.told)
    await publish(store, "rule")
    await live.ended()
    for _ in range(10):
        replayed = await Connection(gateway, headers=cookie("bob"), cursor=live.cursor).ended()
        assert b"event: message" not in replayed.body
        assert replayed.body.endswith(b'retry: 10000\nevent: error\ndata: {"reason":"failed"}\n\n')
    from_start = Connection(gateway, headers=cookie("bob"))
    await from_start.ended()
    assert (from_start.told, from_start.cursor) == ([*told(10), "error"], live.cursor)
    lost = Connection(gateway, headers=cookie("bob"), cursor="garbage")
    await lost.ended()
    assert (lost.told, lost.cursor) == (["error"], None)
    state = await Connection(gateway, headers=cookie("bob"), accept="*/*").ended()
    assert (state.status, state.problem) == (500, "not-shown")
    assert len([each for each in caplog.records if each.name == "semel"]) == 1
    await other.until(lambda c: len(c.told) == 2)
    await other.hang_up()
    assert gateway.status().closed == {"failed": 13, "gone": 1}
    await gateway.aclose()


@pytest.mark.parametrize("left", ["text", 7, {"n": b""}, {"n": float("nan")}], ids=repr)
@simulated(1)
async def test_project_that_gives_what_cannot_be_sent_has_failed(store, left):
    await publish(store, "vision")
    gateway = Gateway(store, project=lambda event, _: left)
    viewer = Connection(gateway)
    await viewer.ended()
    assert viewer.told == ["error"]
    await gateway.aclose()


@simulated()
async def test_a_ticket_is_good_once_for_its_job_and_not_for_long(store):
    tickets = Tickets(store)
    gateway = Gateway(store, tickets=tickets)
    await publish(store, "vision")
    await publish(store, "vision", job_id="8")

    def query(ticket):
        return f"ticket={ticket}".encode()

    ticket = await tickets.issue("alice", JOB)
    assert (await Connection(gateway, "/8", query=query(ticket)).ended()).status == 401
    crowd = [Connection(gateway, query=query(ticket)) for _ in range(5)]
    await asyncio.sleep(0.5)
    assert sorted(viewer.status for viewer in crowd) == [200, 401, 401, 401, 401]
    late = await tickets.issue("alice", JOB)
    await asyncio.sleep(31)
    for bad in (late, ticket, "", "x", 999 * "x", "%00", "%ff"):
        reply = await Connection(gateway, query=query(bad)).ended()
        assert (reply.status, reply.problem) == (401, "unauthorised")
    for viewer in crowd:
        await viewer.hang_up()
    await gateway.aclose()


@simulated(1)
async def test_a_ticket_says_who_it_is_and_authorise_whether_they_may(store):
    seen, allowed = [], {"alice"}

    def authorise(request, job_id):
        who = request.ticket.principal if request.ticket else request.header("cookie")
        seen.append(who)
        return who if who in allowed else None

    tickets = Tickets(store)
    gateway = Gateway(store, authorise=authorise, tickets=tickets, reauthorise_s=10)
    await publish(store, "vision")
    ticket = (await tickets.issue("alice", JOB)).encode()
    viewer = await Connection(gateway, query=b"ticket=" + ticket).until(lambda c: c.told)
    used = Connection(gateway, query=b"ticket=" + ticket, headers=cookie("alice"))
    await used.until(lambda c: c.told)  # a used ticket is none: then there is the cookie
    assert (await Connection(gateway, query=b"ticket=" + ticket).ended()).status == 403
    assert seen == ["alice", "alice", None]
    allowed.clear()
    await asyncio.sleep(12)
    for each in (viewer, used):
        await each.ended()
    await gateway.aclose()


# --- limits -------------------------------------------------------------------------------------


@simulated()
async def test_so_many_connections_and_no_more(store):
    gateway = Gateway(store, authorise=by_cookie, limits=Limits(connections=5, per_principal=3))
    await publish(store, "vision")
    viewers = [await Connection(gateway, headers=cookie("alice")).opened() for _ in range(3)]
    reply = await Connection(gateway, headers=cookie("alice")).ended()
    assert (reply.status, reply.problem) == (429, "too-many-connections")
    assert 2 <= int(reply.header("retry-after")) <= 4
    viewers += [await Connection(gateway, headers=cookie("bob")).opened() for _ in range(2)]
    reply = await Connection(gateway, headers=cookie("carol")).ended()
    assert (reply.status, reply.problem) == (503, "overloaded")
    await viewers.pop(0).hang_up()
    viewers.append(await Connection(gateway, headers=cookie("alice")).opened())
    assert viewers[-1].status == 200
    assert gateway.status().refused == {"429": 1, "503": 1}
    for viewer in viewers:
        await viewer.hang_up()
    assert gateway.status().connections == 0
    await gateway.aclose()


@simulated()
async def test_when_everybody_comes_at_once_some_are_told_to_come_back(store):
    gateway = Gateway(store, limits=Limits(accepts_per_s=10))
    await publish(store, "vision")
    crowd = [Connection(gateway) for _ in range(50)]
    await asyncio.sleep(0.1)
    refused = [viewer.reply() for viewer in crowd if viewer.status == 503]
    assert 28 <= len(refused) <= 30
    assert {reply.problem for reply in refused} == {"overloaded"}
    assert len({reply.header("retry-after") for reply in refused}) > 1
    await asyncio.sleep(5)
    assert (await Connection(gateway).opened()).status == 200
    await gateway.drain(1)
    await gateway.aclose()


@simulated(*range(4))
async def test_who_takes_nothing_and_falls_behind_is_cut_off_and_loses_nothing(store):
    gateway = Gateway(store)
    await publish(store, "vision")
    slow, plain, quick = (Connection(gateway) for _ in range(3))
    slow.can_abort()
    for viewer in (slow, plain, quick):
        await viewer.until(lambda c: c.told)
    for viewer in (slow, plain):
        viewer.stick()
    for n in range(300):
        await store.append(f'{{"seq":{n}}}', STREAM)
        await asyncio.sleep(0.001)
    await asyncio.sleep(2.5)
    assert slow.task.done()
    assert slow.aborted
    assert plain.task.done()  # by a server that cannot abort, the task is cancelled
    assert not quick.task.done()
    assert gateway.status().closed == {"slow": 2}
    for viewer in (slow, plain):
        again = Connection(gateway, cursor=viewer.cursor)
        await again.until(lambda c, v=viewer: len(c.told) + len(v.told) == 301)
        assert [offset for offset, _ in viewer.told + again.told] == list(range(1, 302))
        await again.hang_up()
    await quick.hang_up()
    await gateway.aclose()


@simulated()
async def test_who_takes_nothing_for_long_is_cut_off_even_if_little_happens(store):
    gateway = Gateway(store)
    await publish(store, "vision")
    viewer = await Connection(gateway).can_abort().until(lambda c: c.told)
    viewer.stick()
    await publish(store, "rule")
    await asyncio.sleep(25)
    assert not viewer.aborted
    await asyncio.sleep(10)
    assert viewer.aborted
    await gateway.aclose()


@simulated()
async def test_who_catches_up_is_not_taken_for_slow(store):
    gateway = Gateway(store)
    for n in range(900):
        await store.append(f'{{"seq":{n}, "x":"{1000 * "x"}"}}', STREAM, id=str(n))
    viewer = Connection(gateway).can_abort()
    viewer.pace_s = 5
    await asyncio.sleep(150)
    assert len(viewer.told) == 900
    assert not viewer.aborted
    assert max(len(message.get("body", b"")) for message in viewer.sent) < 70_000
    await viewer.hang_up()
    await gateway.aclose()


# --- outages and ends ---------------------------------------------------------------------------


@simulated()
async def test_while_the_store_is_down_connections_stay_and_new_ones_come_back_later(store):
    gateway = Gateway(store, heartbeat_s=5)
    await publish(store, "vision")
    viewer = await Connection(gateway).until(lambda c: c.told)
    behind = await Connection(gateway, cursor="garbage").until(lambda c: c.told)
    store.is_down = True
    await publish(store, "rule")
    await asyncio.sleep(30)
    assert sum(frame.event == "head" for frame in viewer.frames) >= 4
    assert gateway.status().outage
    reply = await Connection(gateway, "/other").ended()
    assert (reply.status, reply.problem) == (503, "store-unavailable")
    assert reply.header("retry-after")
    assert (await Connection(gateway, accept="*/*").ended()).status == 503
    during = await Connection(gateway).until(lambda c: c.frames)  # the stream is at hand
    store.is_down = False
    await publish(store, "done")
    for each in (viewer, behind, during):
        await each.ended()
    assert viewer.told == during.told == [*told(10, 20, 50), "end"]
    assert behind.told == ["reset", (2, 20), (3, 50), "end"]
    await asyncio.sleep(1)
    assert not gateway.status().outage
    await gateway.aclose()


@simulated()
async def test_who_is_about_to_come_in_when_it_drains_is_sent_away(store):
    """Whatever it waits for just then: nobody would ever tell it anything."""
    await publish(store, "vision")
    asked, may_go_on = [], asyncio.Event()

    async def slow(request, job_id):
        asked.append(job_id)
        await may_go_on.wait()
        return "alice"

    unasked, unread, unsent = Gateway(store, authorise=slow), Gateway(store), Gateway(store)
    asking = Connection(unasked)
    await asking.until(lambda c: asked)
    sending = Connection(unsent)
    sending.stick()
    await asyncio.sleep(0.1)
    assert unsent.status().connections == 1
    store.delay_s = 2.0
    reading = Connection(unread)
    await asyncio.sleep(0.1)
    for gateway in (unasked, unread, unsent):
        await gateway.drain(within_s=1)
    may_go_on.set()
    for connection in (asking, reading):
        reply = await connection.ended()
        assert (reply.status, reply.problem) == (503, "draining")
    sending.stick(False)
    assert (await sending.ended()).status == 200
    for gateway in (unasked, unread, unsent):
        assert gateway.status().connections == 0
        await gateway.aclose()


@simulated()
async def test_draining_closes_everybody_between_frames_and_not_all_at_once(store):
    gateway = Gateway(store)
    await publish(store, "vision")
    crowd = [Connection(gateway) for _ in range(100)]
    for viewer in crowd:
        await viewer.until(lambda c: c.told)
    loop = asyncio.get_running_loop()
    begun, ended = loop.time(), []
    for viewer in crowd:
        viewer.task.add_done_callback(lambda _: ended.append(loop.time() - begun))
    draining = asyncio.ensure_future(gateway.drain(within_s=10))
    number = 0
    while not draining.done():
        number += 1
        await store.append(f'{{"seq":{number}}}', STREAM)
        await asyncio.sleep(0.05)
    assert len(ended) == 100
    assert max(ended) <= 10.1
    assert sum(age < 4 for age in ended) in range(40, 60)
    reply = await Connection(gateway).ended()
    assert (reply.status, reply.problem) == (503, "draining")

    heir = Gateway(store)
    for viewer in crowd[:10]:
        again = Connection(heir, cursor=viewer.cursor)
        await again.until(lambda c, viewer=viewer: len(viewer.told + c.told) == number + 1)
        assert [offset for offset, _ in viewer.told + again.told] == list(range(1, number + 2))
        await again.hang_up()
    for each in (gateway, heir):
        await each.aclose()


@simulated(1)
async def test_a_drain_takes_no_longer_than_there_is_somebody_to_close(store):
    gateway = Gateway(store)
    await publish(store, "vision")
    viewer = await Connection(gateway).until(lambda c: c.told)
    begun = asyncio.get_running_loop().time()
    await gateway.drain(within_s=10)
    assert asyncio.get_running_loop().time() - begun < 1
    assert viewer.task.done()
    await gateway.aclose()


@simulated()
async def test_who_takes_nothing_does_not_hold_up_a_drain(store):
    gateway = Gateway(store)
    await publish(store, "vision")
    crowd = [await Connection(gateway).can_abort().until(lambda c: c.told) for _ in range(3)]
    crowd[0].stick()
    crowd[1].scope["extensions"].clear()
    crowd[1].stick()
    await publish(store, "rule")
    begun = asyncio.get_running_loop().time()
    await gateway.drain(within_s=10)
    assert asyncio.get_running_loop().time() - begun <= 10.1
    assert all(viewer.task.done() for viewer in crowd)
    await gateway.aclose()


@simulated(1)
async def test_a_client_that_is_gone_is_let_go_of(store):
    gateway = Gateway(store)
    await publish(store, "vision")
    viewers = [await Connection(gateway).until(lambda c: c.told) for _ in range(3)]
    await viewers[0].hang_up()

    async def refusing(_):
        raise OSError("gone")  # as some servers say it

    viewers[1]._on_send = refusing
    await publish(store, "rule")
    await asyncio.wait_for(viewers[1].task, 5)
    viewers[2].task.cancel()  # a server that ends
    with pytest.raises(asyncio.CancelledError):
        await viewers[2].task
    assert gateway.status().connections == 0
    await asyncio.sleep(10)
    assert gateway.status().streams == 0
    await gateway.aclose()


@simulated(1)
async def test_a_lifespan_is_answered_and_its_end_closes_what_is_open(store):
    gateway = Gateway(store)
    said, messages = [], asyncio.Queue()

    async def send(message):
        said.append(message["type"])

    living = asyncio.ensure_future(gateway({"type": "lifespan"}, messages.get, send))
    messages.put_nowait({"type": "lifespan.startup"})
    await publish(store, "vision")
    viewer = await Connection(gateway).until(lambda c: c.told)
    messages.put_nowait({"type": "lifespan.shutdown"})
    await living
    await viewer.ended()
    assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@simulated(1)
async def test_a_socket_is_refused(store):
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message["type"])

    await Gateway(store)({"type": "websocket", "path": "/7"}, receive, send)
    assert sent == ["websocket.close"]


def test_frames_are_read_whole():
    """What the tests above rely on."""
    assert frames_of(b"event: head\ndata: {}\n\n")[0].event == "head"
    with pytest.raises(AssertionError, match="cut"):
        frames_of(b"event: head\ndata")
    assert Position.parse(json.loads('"1.0123456789ab"'))
