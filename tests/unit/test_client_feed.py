"""The rules of a feed's client, without a client: the vectors that every client is held to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.client.feed import feed
from semel.client.feed_frames import Frames, TooLargeError
from semel.client.feed_rules import Connect, Deliver, Follower, Opening, Over, Reset, Terms
from semel.entries import Position
from semel.errors import SettingsError
from support.feed_vectors import Server, Walk, bytes_of, cases, cursor_of, frame, shown

FILES = ("answers", "backoff", "end", "garbage", "order", "silence")
WALKS = [(file, case) for file in FILES for case in cases(file)]
FEED = Opening(200, "text/event-stream")


def named(cases):
    return {"ids": [case["name"] for case in cases]}


# --- the vectors --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for _, case in WALKS], **named([c for _, c in WALKS]))
@pytest.mark.parametrize("chance", [0.0, 1.0], ids=["least", "most"])
def test_a_follower_does_what_is_written(case, chance):
    walk = Walk(case.get("options", {}), chance)
    for step in case["steps"]:
        walk.take(step)
    assert walk.seen == []  # nothing happened that nobody expected


@pytest.mark.parametrize("case", cases("frames"), **named(cases("frames")))
def test_bytes_are_frames_in_pieces_of_any_size(case):
    raw = bytes_of(case)
    for size in (1, 2, 3, 5, len(raw) or 1):
        frames, got, too_large = read(raw, size, case.get("limit", 1 << 20))
        assert [[f.event, f.data, f.id] for f in got] == case["frames"]
        assert frames.retry_ms == case.get("retry")
        assert too_large == case.get("too_large", False)


def read(raw, size, limit=1 << 20):
    frames, got = Frames(limit), []
    try:
        for at in range(0, len(raw), size):
            frames.feed(raw[at : at + size])
            while (found := frames.next()) is not None:
                got.append(found)
    except TooLargeError:
        return frames, got, True
    return frames, got, False


@pytest.mark.parametrize("case", cases("every_cut"), **named(cases("every_cut")))
def test_a_feed_that_is_cut_behind_any_byte_is_handed_over_whole(case):
    server = Server(case)
    for cut in range(len(server.answer(None)) + 1):
        delivered, _ = followed(server, [cut])
        assert delivered == case["delivered"], cut


@pytest.mark.parametrize("case", cases("every_cut"), **named(cases("every_cut")))
def test_a_feed_that_is_cut_again_and_again_is_handed_over_whole(case):
    server = Server(case)
    for cut in range(1, len(server.answer(None)), 3):
        delivered, connections = followed(server, [cut, cut // 2, cut + 7, 1, cut])
        assert delivered == case["delivered"], cut
        assert connections <= 7


@pytest.mark.parametrize("case", cases("every_cut"), **named(cases("every_cut")))
def test_a_feed_in_pieces_of_any_size_is_handed_over_whole(case):
    server = Server(case)
    for size in range(1, 60):
        delivered, connections = followed(server, [], size=size)
        assert (delivered, connections) == (case["delivered"], 1), size


def followed(server, cuts, size=None):
    """What is handed over when the connections are cut behind so many bytes; how many there were.

    Behind the last cut, connections last.
    """
    follower = Follower(Terms(), lambda: 0.0)
    delivered, cuts, pieces, connections = [], list(cuts), [], 0
    size = size or 1 << 20
    while True:
        match follower.next(0.0):
            case Over(error=error):
                assert error is None
                return delivered, connections
            case Deliver(event=event):
                delivered.append(shown(event))
            case Connect(cursor=cursor):
                connections += 1
                raw = server.answer(cursor)
                raw = raw[: cuts.pop(0)] if cuts else raw
                pieces = [
                    raw[at : at + (size or 1 << 20)] for at in range(0, len(raw), size or 1 << 20)
                ]
                follower.opened(0.0, FEED)
            case _ if pieces:
                follower.received(pieces.pop(0))
            case _:
                follower.closed(0.0)


# --- what nobody wrote down ---------------------------------------------------------------------

WORDS = ("data", "id", "event", "retry", ":", ": ", "\0", "é€😀", "{}", "reset", "end", "head", "7")
BREAKS = ("\r", "\n", "\r\n", "\n\n", "\ufeff", "1.0123456789ab")
SCRAPS = st.sampled_from([text.encode() for text in (*WORDS, *BREAKS)])
NOISE = st.lists(SCRAPS | st.binary(max_size=6), max_size=40).map(b"".join)


@given(NOISE, st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_frames_are_the_same_in_whatever_pieces_they_come(raw, size):
    whole, in_pieces = read(raw, len(raw) or 1), read(raw, size)
    assert whole[1:] == in_pieces[1:]
    assert whole[0].retry_ms == in_pieces[0].retry_ms


@given(NOISE, st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_noise_is_followed_by_order_or_by_an_error(raw, size):
    """Whatever comes, what is handed over goes up by one, and a cursor is always one."""
    follower, offset = Follower(Terms(limit=200), lambda: 1.0, after=Position(4, "0" * 12)), 4
    follower.opened(0.0, FEED)
    for at in range(0, len(raw), size):
        follower.received(raw[at : at + size])
        while isinstance(step := follower.next(0.0), Deliver):
            told = step.event
            assert isinstance(told, Reset) or told.position.offset == offset + 1
            offset = told.position.offset
        assert Position.parse(follower.cursor) is not None
        if isinstance(step, Connect):
            assert step.cursor == follower.cursor
            follower.opened(0.0, FEED)


@given(st.lists(st.integers(1, 9), max_size=30))
@settings(max_examples=150, deadline=None)
def test_entries_in_any_order_are_handed_over_in_theirs(offsets):
    follower, got, due = Follower(Terms(), lambda: 0.0, after=Position(0, "0" * 12)), [], 1
    for offset in offsets:
        due += offset == due
        follower.opened(0.0, FEED)
        follower.received(frame("message", {"n": offset}, offset))
        while isinstance(step := follower.next(0.0), Deliver):
            got.append(step.event.position.offset)
    assert got == list(range(1, due))  # as soon as it is its turn, each


def test_a_connection_in_the_middle_of_an_event_is_told_from_one_between_two():
    frames = Frames(100)
    assert frames.is_between
    for piece in (b"data: x", b"\n", b"id: 1\n"):
        frames.feed(piece)
        assert frames.next() is None
        assert not frames.is_between
    frames.feed(b"\n")
    assert frames.next() is not None
    assert frames.is_between


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"after": "7"}, "is no cursor"),
        ({"after": ""}, "is no cursor"),
        ({"after": "9007199254740993.aaaaaaaaaaaa"}, "is no cursor"),
        ({"after": cursor_of(3), "last_seq": 7}, "either after= or last_seq="),
        ({"silence_s": 0}, "silence_s=0"),
        ({"grace_s": float("nan")}, "grace_s=nan"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused(options, words):
    with pytest.raises(SettingsError, match=words):
        feed("http://example.test/job-1", **options)


def test_a_cursor_is_given_as_it_was_printed_or_as_a_position():
    position = Position(3, "000000000003")
    for after in (position, str(position)):
        assert feed("http://example.test/job-1", after=after).cursor == "3.000000000003"
