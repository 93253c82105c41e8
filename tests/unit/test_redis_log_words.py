"""What a log says to Redis: names, numbers, and words in the right number."""

from __future__ import annotations

import re

import hiredis
import pytest
import redis
from redis.crc import key_slot

from semel.colour import ASYNC
from semel.entries import Appended, Field, Keep, Replace
from semel.errors import SettingsError
from semel.stores import log_rules
from semel.stores.redis import RedisStore
from semel.stores.redis import log_words as words
from semel.testing.log_appending import STREAM, put


@pytest.mark.parametrize("name", ["TRIMS_PER_APPEND", "FORGETS_PER_APPEND"])
def test_the_script_does_as_much_per_append_as_the_rules_say(name):
    names, numbers = re.search(rb"local (\w+, \w+) = (\d+, \d+)", words.APPEND.source).groups()
    said = dict(zip(names.split(b", "), numbers.split(b", "), strict=True))
    assert int(said[name.encode()]) == getattr(log_rules, name)


@pytest.mark.parametrize("stream", ["jobs/42", "a b", "{a}b", "}{", "ü*?[x]", "a%7Bb"])
def test_everything_about_a_stream_lies_in_one_slot(stream):
    place = words.place_of("ns:x", stream)
    assert place.meta.startswith(b"semel:ns:x:{")
    keys = {place.meta, place.log, place.state}
    assert len(keys) == 3
    assert {key_slot(key) for key in (*keys, place.channel)} == {place.slot}
    assert not set(place.meta[len(b"semel:ns:x:{") : -len(b"}:meta")]) & set(b"{}*?[] ")


def test_two_streams_never_share_a_key():
    names = ["a", "A", "a/b", "a%2Fb", "a:meta", "é", "e\u0301", "a}:meta", "{a"]
    assert len({words.place_of("n", name).meta for name in names}) == len(names)
    with pytest.raises(SettingsError):
        words.place_of("n", "")


@pytest.mark.parametrize("fences", [{}, {"p": 1}, {"p": 1, "q": 2}])
@pytest.mark.parametrize("state", [None, Replace(b"s\r\n"), Field("f", 3, b"")])
def test_a_command_has_as_many_words_as_it_says(fences, state):
    place = words.place_of("n", "s")
    keep = words.packed_keep(Keep(idle_s=1), True, True)
    packed = words.appending(place, "a" * 40, "id", b"data", b"reply", 7, keep)
    packed = words.with_more(packed, fences, (), state)
    reader = hiredis.Reader()
    reader.feed(packed)
    said = reader.gets()
    assert not reader.has_data()
    more = {type(None): 0, Replace: 1, Field: 3}[type(state)]
    assert len(said) == 2 + 1 + 3 + 15 + 2 * len(fences) + more
    assert said[-1 - more - 2 * len(fences)] == b"%d" % len(fences)


async def test_offsets_fences_and_ranks_are_exact_up_to_the_largest(redis_url):
    store, large = RedisStore(redis_url), 2**53 - 4
    log = store.log(ASYNC)
    await put(log, "a")
    with redis.Redis.from_url(redis_url) as admin:
        place = words.place_of("default", STREAM)
        admin.hset(place.meta, mapping={"o": large, "p": large, "q": "0" * 12})
        positions = [await put(log, f"e{n}", expect=large + n) for n in range(3)]
        assert [p.offset for p in positions] == [large + 1, large + 2, large + 3]
        page = await log.read(STREAM, positions[0])
        assert [e.position for e in page.entries] == positions[1:]
        assert isinstance(await log.append(STREAM, None, id="r", expect=large + 3), Appended)
        assert await log.trim(STREAM, large + 2) == 2
        assert list(await log.heads([STREAM])) == [positions[2]]
    await store.aclose()
