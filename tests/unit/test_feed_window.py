"""The last entries of a stream: what stays, what goes, and what is made once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semel.entries import Entry, Position
from semel.feed.window import CHUNK_BYTES, KEEP_BYTES, KEEP_ENTRIES, Window


def position(offset):
    return Position(offset, f"{offset:012x}")


def entries(first, last, size=10):
    return [Entry(position(n), str(n), size * b"x", 0) for n in range(first, last + 1)]


def window(floor=0, last=0, size=10):
    made = Window(position(floor), lambda entry: entry.data)
    made.add(entries(floor + 1, last, size))
    return made


def test_it_keeps_so_many_and_whatever_came_last():
    kept = window(last=10)
    for n in range(11, 2000):
        kept.add(entries(n, n))
        assert len(kept) <= KEEP_ENTRIES + 1
        assert kept.has(position(n - 1))
    kept.add(entries(2000, 3000))
    assert kept.has(position(1999))  # whoever was at the head can take it all
    kept.trim()
    assert kept.floor == position(3000 - KEEP_ENTRIES)


def test_it_keeps_so_many_bytes():
    kept = window(last=100, size=KEEP_BYTES // 10)
    kept.trim()
    assert kept.floor == position(90)
    assert kept.bytes_after(95) == 5 * (KEEP_BYTES // 10)
    assert kept.bytes_after(0) == kept.bytes_after(90)  # all there is
    assert kept.bytes_after(100) == 0


def test_everybody_at_one_place_is_given_the_same_bytes_and_large_ones_in_chunks():
    kept = window(last=5)
    assert kept.burst(2) is kept.burst(2)
    assert kept.burst(2).frames == 30 * b"x"
    assert kept.burst(2).position is kept.head
    kept.add(entries(6, 6))
    assert kept.burst(2).position == position(6)
    large = window(last=10, size=CHUNK_BYTES // 2 + 1)
    assert large.burst(0).position == position(2)


def test_what_was_read_of_the_time_before_is_kept_if_it_fits():
    kept = window(floor=50, last=60)
    assert not kept.precede(position(40), entries(41, 49))  # there is a hole
    assert not kept.precede(Position(40, "another"), [*entries(41, 49), _other(50)])
    assert kept.precede(position(40), entries(41, 55))
    assert (kept.floor, len(kept)) == (position(40), 20)
    assert kept.burst(40).position == kept.head
    assert kept.bytes_after(40) == 200
    assert not window(floor=500, last=510).precede(position(100), entries(101, 500))  # too many
    assert not kept.precede(position(45), entries(46, 60))  # it has these


def _other(offset):
    return Entry(Position(offset, "0123456789ab"), "other", b"", 0)


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 40_000)), max_size=8))
def test_whatever_comes_a_follower_at_the_head_goes_on_without_a_hole(pages):
    kept, offset, head = window(), 0, 0
    for count, size in pages:
        kept.add(entries(head + 1, head + count, size))
        head += count
        while offset < head:
            burst = kept.burst(offset)
            assert [e.position.offset for e in burst.entries] == list(
                range(offset + 1, burst.position.offset + 1)
            )
            offset = burst.position.offset
        assert kept.has(position(offset))
        assert kept.bytes_after(offset) == 0
