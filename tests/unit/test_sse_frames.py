"""Frames, cursors and paths: what is written, and what is made of whatever comes."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from semel.client.feed_frames import Frames
from semel.entries import Entry, Position
from semel.errors import SettingsError
from semel.http.asgi import request_of
from semel.http.protocol import Refusal
from semel.http.sse import Gateway, Limits, frames
from semel.http.sse.asking import asked, job_of
from semel.http.sse.cors import Cors
from semel.http.sse.limits import Bucket, Seats
from semel.stores import MemoryStore
from support.web import scope_of

HERE = Position(47, "9f3c00d1a2b3")


# --- frames -------------------------------------------------------------------------------------


def test_frames_are_as_they_are_written_down():
    entry = Entry(HERE, "id", b'{"seq":1}', 0)
    assert frames.entry(entry) == b'event: message\ndata: {"seq":1}\nid: 47.9f3c00d1a2b3\n\n'
    assert frames.head(HERE) == b'event: head\ndata: {"head":"47.9f3c00d1a2b3"}\n\n'
    assert frames.hello(HERE, Position(2, "0123456789ab"), 1500) == (
        b'retry: 1500\nevent: hello\ndata: {"head":"47.9f3c00d1a2b3"}\nid: 2.0123456789ab\n\n'
    )
    assert frames.hello(HERE, None, 1500).endswith(b'"}\n\n')
    assert frames.hidden(HERE) == (
        b'event: head\ndata: {"head":"47.9f3c00d1a2b3"}\nid: 47.9f3c00d1a2b3\n\n'
    )
    assert frames.end(HERE) == (
        b'event: end\ndata: {"position":"47.9f3c00d1a2b3"}\nid: 47.9f3c00d1a2b3\n\n'
    )
    assert frames.reset("ahead", HERE, {"stages": {}}) == (
        b'event: reset\ndata: {"reason":"ahead","position":"47.9f3c00d1a2b3",'
        b'"state":{"stages":{}}}\nid: 47.9f3c00d1a2b3\n\n'
    )


@given(st.text(), st.integers(1, 7))
def test_whatever_an_entry_says_arrives_as_one_event_however_it_is_cut(text, size):
    data = json.dumps({"x": text}, ensure_ascii=False, indent=1).encode("utf-8", "replace")
    frame = frames.entry(Entry(HERE, "id", data, 0))
    read = Frames(1 << 20)
    for start in range(0, len(frame), size):
        assert read.next() is None
        read.feed(frame[start : start + size])
    found = read.next()
    assert (found.event, found.id) == ("message", str(HERE))
    assert json.loads(found.data) == json.loads(data)
    assert read.next() is None


# --- what is asked ------------------------------------------------------------------------------


def asked_with(*, cursor=None, query=b"", accept=b"text/event-stream"):
    headers = [(b"accept", accept)]
    if cursor is not None:
        headers.append((b"last-event-id", cursor))
    return asked(request_of(scope_of("/7", method="GET", headers=headers, query=query)))


def test_the_header_wins_and_an_empty_one_is_none():
    one, other = b"1.0123456789ab", b"2.0123456789ab"
    assert asked_with(cursor=one, query=b"after=" + other).after.offset == 1
    assert asked_with(cursor=b"", query=b"after=" + other).after.offset == 2
    both = asked_with(query=b"after=%32.0123456789ab&last_seq=3")
    assert (both.after.offset, both.last_seq) == (2, 3)
    assert asked_with(query=b"last_seq=3&last_seq=4").last_seq == 3
    assert asked_with(query=b"after=&last_seq=").lost is None


@given(cursor=st.none() | st.binary(), query=st.binary())
def test_no_cursor_and_no_query_is_an_error(cursor, query):
    found = asked_with(cursor=cursor, query=query)
    assert (found.after is None) or (found.lost is None)


@given(st.binary(min_size=1).filter(lambda b: b.strip(b" \t")))
@example(b"\x85")  # a space to Python, and to no header
def test_a_cursor_that_is_none_is_unreadable(cursor):
    found = asked_with(cursor=cursor)
    text = cursor.decode("latin-1").strip(" \t")
    assert (found.lost == "unreadable") or Position.parse(text) == found.after is not None


@pytest.mark.parametrize(
    ("accept", "is_stream"),
    [
        (b"text/event-stream", True),
        (b"application/json, TEXT/Event-Stream;q=0.9", True),
        (b"*/*", False),
        (b"application/json", False),
    ],
)
def test_a_stream_is_for_those_who_ask_for_one(accept, is_stream):
    assert asked_with(accept=accept).is_stream == is_stream


@pytest.mark.parametrize(
    ("path", "root", "base", "job"),
    [
        ("/7", "", "", "7"),
        ("/jobs/7", "", "/jobs", "7"),
        ("/jobs/7", "/jobs", "", "7"),
        ("/api/jobs/7", "/api/", "/jobs", "7"),
        ("/jobs/7", "/api", "/jobs", "7"),  # by a server that leaves the root out
        ("/%6Aobs/7", "", "/jobs", "7"),
        ("/jobs/a%2Fb", "", "/jobs", "a/b"),
        ("/jobs%2F7", "/jobs", "", None),
        ("/jobs/7/8", "", "/jobs", None),
        ("/other/7", "", "/jobs", None),
        ("/jobs/%ff", "", "/jobs", None),
    ],
)
def test_a_path_names_a_job_below_where_the_gateway_is(path, root, base, job):
    from urllib.parse import unquote

    scope = scope_of(path, root_path=root) | {"path": unquote(path)}
    assert job_of(scope, base) == job


def test_a_server_that_keeps_no_raw_path_has_jobs_without_slashes():
    scope = scope_of("/jobs/ü") | {"raw_path": None}
    assert job_of(scope, "/jobs") == "ü"
    assert job_of(scope_of("/jobs/a/b") | {"raw_path": None}, "/jobs") is None


@given(st.text(), st.binary())
def test_no_path_is_an_error(path, raw):
    job_of(scope_of("/") | {"path": path, "raw_path": raw}, "/jobs")


# --- limits -------------------------------------------------------------------------------------


def test_a_bucket_fills_at_its_rate_up_to_two_seconds_worth():
    bucket = Bucket(10)
    assert sum(bucket.take(0.0) for _ in range(100)) == 20
    assert sum(bucket.take(0.5) for _ in range(100)) == 5
    assert sum(bucket.take(60.0) for _ in range(100)) == 20


def test_a_bucket_that_fills_slowly_gives_one_in_the_end():
    bucket = Bucket(0.1)
    assert [bucket.take(now) for now in (0.0, 1.0, 11.0)] == [True, False, True]


def test_seats_are_counted_by_principal_also_by_one_that_changes_or_cannot_be_hashed():
    seats, ada = Seats(Limits(per_principal=1)), {"user": 1}
    with seats.of(ada):
        with pytest.raises(Refusal), seats.of({"user": 1}):
            pass
        with seats.of({"user": 2}):
            ada["seen"] = "now"
    with seats.of({"user": 1}), seats.of({"user": 1, "seen": "now"}):
        pass
    with contextlib.ExitStack() as stack:
        for principal in (None, None, True, True):  # whoever is nobody in particular is not counted
            stack.enter_context(seats.of(principal))


def test_a_seat_is_taken_before_anybody_is_asked():
    seats = Seats(Limits(connections=1))
    with seats.taken(0.0):
        with pytest.raises(Refusal), seats.taken(0.0):
            pass
        assert len(seats) == 1
    assert len(seats) == 0


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (None, None),
        ("session=s3cret", "s3cret"),
        ("theme=dark; session=s3cret", "s3cret"),
        ("session=s3cret; theme=dark", "s3cret"),
        ('session="s3cret"', "s3cret"),
        ("mysession=other", None),
        ("session", None),
        ("session=; x=1", ""),
        ("session=a=b", "a=b"),
    ],
)
def test_a_cookie_is_found_by_its_whole_name(header, found):
    headers = () if header is None else ((b"cookie", header.encode()),)
    assert request_of(scope_of("/", headers=headers)).cookie("session") == found


async def project_later(event, principal):
    return event


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"authorise": "app:who"}, "no function"),
        ({"project": 7}, "no function"),
        ({"project": project_later}, "plain def"),
        ({"tickets": True}, "Tickets"),
        ({"unknown": "404"}, "refuse"),
        ({"heartbeat_s": 0}, "heartbeat_s"),
        ({"max_age_s": -1}, "max_age_s"),
        ({"authorise": print, "reauthorise_s": 0}, "reauthorise_s"),
        ({"retry_ms": 500}, "retry_ms"),
        ({"retry_ms": (2500, 500)}, "retry_ms"),
        ({"cors": "shop.example"}, "no origin"),
        ({"cors": ["https://shop.example/page"]}, "no origin"),
    ],
)
def test_what_would_fail_at_each_request_is_told_before_the_first(settings, said):
    with pytest.raises(SettingsError, match=said):
        Gateway(MemoryStore(), **settings)


@pytest.mark.parametrize("name", ["connections", "behind_events", "write_within_s"])
def test_a_limit_of_nothing_is_refused(name):
    with pytest.raises(SettingsError, match=name):
        Limits(**{name: 0}).check()


def test_without_origins_nothing_is_said_of_them():
    request = request_of(scope_of("/", headers=[(b"origin", b"https://a.example")]))
    assert Cors(None).headers(request) == ()
    said = dict(Cors("*").headers(request))
    assert said[b"access-control-allow-origin"] == b"*"
    assert b"access-control-allow-credentials" not in said
