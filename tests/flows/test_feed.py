"""Following streams: in order, without a hole or a repeat, or with the word that there is a hole.

In simulated time: whoever is woken next is drawn by lot.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest

from semel.entries import Keep, Position, beginning
from semel.errors import CorruptRecordError, SettingsError, StoreUnavailableError
from semel.feed import MOST_QUESTIONS, End, Feed, Reset, Update
from semel.feed.subscription import REPLAY_MOST
from semel.feed.window import KEEP_ENTRIES
from semel.stores import FileStore
from support.feeds import STREAM, Following, simulated


def texts(following):
    """The data of the entries it was told of, and the reason of each reset."""
    told = []
    for news in following.told:
        match news:
            case Update(entry):
                told.append(entry.data.decode())
            case Reset(reason):
                told.append(reason)
            case End():
                told.append("end")
    return told


def numbers(first, last):
    return [str(n) for n in range(first, last + 1)]


def assert_whole(following):
    """Each position follows the one before, except behind a reset."""
    offset = None
    for news in following.told:
        match news:
            case Update(entry):
                assert offset is None or entry.position.offset == offset + 1
                offset = entry.position.offset
            case Reset(_, snapshot):
                offset = snapshot.position.offset


# --- in order -----------------------------------------------------------------------------------


@simulated()
async def test_everything_there_is_and_everything_that_comes_is_told_in_order(store):
    await store.fill(range(1, 4))
    async with Feed(store) as feed:
        following = Following(feed)
        await following.until(lambda f: len(f.told) == 3)
        await store.fill(range(4, 7))
        await store.append("7", ends=True)
        await following.until(lambda f: f.over)
    assert texts(following) == [*numbers(1, 7), "end"]


@simulated()
async def test_who_comes_back_goes_on_behind_its_cursor(store):
    await store.fill(range(1, 6))
    third = (await store.inner._log.read(STREAM)).entries[2].position
    async with Feed(store) as feed:
        others = Following(feed)
        await others.until(lambda f: len(f.told) == 5)
        for after in (third, str(third)):
            following = Following(feed, after=after)
            await following.until(lambda f: len(f.told) == 2)
            assert texts(following) == ["4", "5"]


@simulated()
async def test_a_stream_that_is_not_there_yet_is_waited_for(store):
    async with Feed(store) as feed:
        following = Following(feed)
        await asyncio.sleep(3)
        assert following.told == []
        await store.append("1", ends=True)
        await following.until(lambda f: f.over)
    assert texts(following) == ["1", "end"]


@simulated()
async def test_an_end_that_has_no_entry_is_an_end(store):
    await store.append("1")
    async with Feed(store) as feed:
        following = Following(feed)
        await following.until(lambda f: f.told)
        await store.inner._log.append(STREAM, None, id="over", ends=True)
        await following.until(lambda f: f.over)
    assert texts(following) == ["1", "end"]


@simulated(*range(5))
async def test_many_followers_of_a_busy_stream_each_get_everything_once(store):
    store.delay_s = 0.001
    async with Feed(store) as feed:
        following = []
        for n in range(1, 301):
            await store.append(str(n), ends=n == 300)
            await asyncio.sleep(0.001)
            if n % 60 == 1:
                following.append(Following(feed))
        for each in following:
            await each.until(lambda f: f.over)
    for each in following:
        assert texts(each) == [*numbers(1, 300), "end"]


@simulated()
async def test_who_takes_its_time_is_served_from_the_log(store):
    """Further behind than the window keeps."""
    count = KEEP_ENTRIES + 100
    await store.append("0")
    async with Feed(store) as feed:
        slow = feed.subscribe(STREAM)
        told = [await anext(slow)]
        quick = Following(feed)
        for n in range(1, count):
            await store.append(str(n))
            await asyncio.sleep(0.01)
        await quick.until(lambda f: len(f.told) == count)
        told += [await anext(slow) for _ in range(count - 1)]
        assert [int(news.entry.data) for news in told] == list(range(count))
        await slow.aclose()


@simulated()
async def test_entries_that_are_large_are_taken_a_few_at_a_time(store):
    large = [f"{n}" + 30_000 * "x" for n in range(100)]
    for text in large:
        await store.append(text, id=text[:10])
    async with Feed(store) as feed:
        following = Following(feed)
        await following.until(lambda f: len(f.told) == 100)
    assert texts(following) == large


# --- once for everybody -------------------------------------------------------------------------


@simulated()
async def test_one_reader_serves_everybody_who_follows_a_stream(store):
    await store.fill(range(1, 4))
    async with Feed(store) as feed:
        crowd = [Following(feed) for _ in range(100)]
        for each in crowd:
            await each.until(lambda f: len(f.told) == 3)
        asked = store.asked["read"]
        await store.append("4")
        for each in crowd:
            await each.until(lambda f: len(f.told) == 4)
        assert store.asked["read"] == asked + 1
        assert store.asked["listen"] == 1
        await asyncio.gather(*(each.stop() for each in crowd))


@simulated()
async def test_a_crowd_that_comes_back_asks_for_one_snapshot_per_stream(store):
    streams = [f"scan:job:{n}" for n in range(3)]
    for stream in streams:
        await store.fill(range(10), stream)
        await store.trim(5, stream)
    store.delay_s = 0.01
    async with Feed(store) as feed:
        crowd = []
        for n in range(300):
            old = Position(1 + n % 3, "0123456789ab")
            crowd.append(Following(feed, streams[n % 3], old))
            if n % 10 == 0:
                await asyncio.sleep(0.01)
        for each in crowd:
            await each.until(lambda f: f.told)
            assert texts(each) == ["trimmed"]
        assert store.asked["load"] == 3
        await asyncio.gather(*(each.stop() for each in crowd))


@simulated()
async def test_after_a_restart_cursors_close_to_each_other_cost_few_reads(store):
    await store.fill(range(1, 101))
    positions = [entry.position for entry in (await store.inner._log.read(STREAM)).entries]
    async with Feed(store) as feed:
        crowd = [Following(feed, after=positions[90 - n // 10]) for n in range(200)]
        for n, each in enumerate(crowd):
            await each.until(lambda f, n=n: len(f.told) == 9 + n // 10)
            assert texts(each) == numbers(92 - n // 10, 100)
        assert store.asked["read"] <= 25
        assert store.asked["load"] == 0
        await asyncio.gather(*(each.stop() for each in crowd))


@simulated()
async def test_a_stream_that_nobody_follows_leaves_memory(store):
    await store.append("1")
    async with Feed(store) as feed:
        following = Following(feed)
        await following.until(lambda f: f.told)
        await following.stop()
        assert len(feed) == 1  # they may come back
        await asyncio.sleep(10)
        assert len(feed) == 0
        assert store.asked["leave"] == 1

        unknown = Following(feed, "scan:job:unknown")
        await asyncio.sleep(0.1)
        await unknown.stop()
        assert len(feed) == 0  # at once


@simulated()
async def test_an_ended_stream_leaves_memory_however_many_come_to_see_it(store):
    """Or it would be shown for longer than it is kept."""
    await store.append("1", ends=True, keep=Keep(ended_s=20.0))
    async with Feed(store) as feed:
        shown = []
        for _ in range(30):
            following = Following(feed)
            await following.until(lambda f: f.over)
            shown.append(texts(following)[0])
            await asyncio.sleep(1)
        assert shown[:18] == 18 * ["1"]
        assert shown[-3:] == 3 * ["gone"]


# --- lost rings ---------------------------------------------------------------------------------


@simulated()
async def test_with_all_rings_lost_everybody_is_late_by_at_most_a_second(store):
    store.is_deaf = True
    async with Feed(store) as feed:
        following = Following(feed)
        for n in range(1, 6):
            await asyncio.sleep(2.0)
            await store.append(str(n))
            await asyncio.sleep(1.0)
            assert texts(following) == numbers(1, n)
        assert feed.counts.rings == 0
        assert feed.counts.found == 5
        await following.stop()


@simulated()
async def test_a_bell_that_fails_makes_everybody_late_and_nothing_else(store):
    store.is_mute = True
    await store.append("1")
    async with Feed(store) as feed:
        following = Following(feed)
        await following.until(lambda f: len(f.told) == 1)
        await store.append("2", ends=True)
        await following.until(lambda f: f.over)
    assert texts(following) == ["1", "2", "end"]


@simulated()
async def test_what_happens_while_it_begins_to_listen_is_told_at_once(store):
    """Who reads first and listens then has missed that ring."""
    await store.append("1")
    store.listen_s = 0.5
    async with Feed(store) as feed:
        following = Following(feed)
        await asyncio.sleep(0.4)
        await store.append("2")
        await asyncio.sleep(0.15)
        assert texts(following) == ["1", "2"]
        assert feed.counts.found == 0
        await following.stop()


@simulated(1)
async def test_a_thousand_idle_streams_cost_one_question_a_second(store):
    async with Feed(store) as feed:
        crowd = [Following(feed, f"scan:job:{n}") for n in range(1000)]
        await asyncio.sleep(1)
        asked = store.asked.copy()
        await asyncio.sleep(10)
        assert store.asked["read"] == asked["read"]
        assert store.asked["heads"] - asked["heads"] <= 16
        await asyncio.gather(*(each.stop() for each in crowd))


# --- outages ------------------------------------------------------------------------------------


@simulated()
async def test_a_store_that_is_down_is_waited_for_and_nobody_is_lost(store):
    await store.fill(range(1, 4))
    async with Feed(store) as feed:
        before = Following(feed)
        await before.until(lambda f: len(f.told) == 3)
        store.is_down = True
        await store.append("4")  # by others, on the other side of the cut
        during = Following(feed, after=beginning(STREAM))
        other = Following(feed, "scan:job:8")
        await asyncio.sleep(30)
        assert store.asked["read"] < 100
        await store.fill(range(1, 3), "scan:job:8")
        store.is_down = False
        await asyncio.sleep(1.1)
        assert texts(before) == numbers(1, 4)
        assert texts(during) == numbers(1, 4)
        assert texts(other) == numbers(1, 2)
        for each in (before, during, other):
            await each.stop()


@simulated()
async def test_who_needs_the_log_when_it_is_down_is_served_when_it_is_back(store):
    """Although nothing has happened meanwhile that the others would be told of."""
    await store.fill(range(1, KEEP_ENTRIES + 100))
    async with Feed(store) as feed:
        live = Following(feed)
        await live.until(lambda f: len(f.told) == KEEP_ENTRIES + 99)
        store.is_down = True
        behind = [Following(feed, after=after) for after in (beginning(STREAM), "garbage")]
        await asyncio.sleep(10)
        assert [texts(each) for each in behind] == [[], []]
        store.is_down = False
        await asyncio.sleep(1.1)
        assert texts(behind[0]) == numbers(1, KEEP_ENTRIES + 99)
        assert texts(behind[1]) == ["unreadable"]
        for each in (live, *behind):
            await each.stop()


@simulated()
async def test_a_stream_that_cannot_be_read_is_no_outage(store, caplog):
    """It is told once, the others go on, and so does this one when it is mended."""
    caplog.clear()
    await store.fill(range(1, 3))
    await store.fill(range(1, 3), "other")
    async with Feed(store) as feed:
        following, other = Following(feed), Following(feed, "other")
        await following.until(lambda f: len(f.told) == 2)
        store.corrupt = STREAM
        await store.append("3")
        await store.append("3", "other")
        await other.until(lambda f: len(f.told) == 3)
        await asyncio.sleep(10)
        assert not feed.circuit.is_open
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert STREAM in caplog.text
        store.corrupt = ""
        await following.until(lambda f: texts(f) == numbers(1, 3))
        await following.stop()
        await other.stop()


@simulated()
async def test_a_store_that_is_damaged_is_an_outage(store):
    await store.fill(range(1, 3))
    async with Feed(store) as feed:
        following = Following(feed)
        await following.until(lambda f: len(f.told) == 2)
        store.is_damaged = True
        await store.append("3")
        await asyncio.sleep(10)
        assert feed.circuit.is_open
        store.is_damaged = False
        await following.until(lambda f: texts(f) == numbers(1, 3))
        assert not feed.circuit.is_open
        await following.stop()


@simulated(1)
async def test_a_stream_whose_end_cannot_be_told_takes_the_net_from_no_other(store):
    """All rings are lost, so that whoever is told anything has it from the net."""
    store.is_deaf = True
    bad = ("s3", "s90")

    async with Feed(store) as feed:
        heads, asked = feed.log.heads, []

        async def told(streams):
            asked.append(len(streams))
            if set(bad) & set(streams):
                raise CorruptRecordError("one of these cannot be read")
            return await heads(streams)

        feed.log.heads = told
        crowd = {name: Following(feed, name) for name in (f"s{n}" for n in range(100))}
        await asyncio.sleep(3)
        for name in crowd:
            await store.append("1", name)
        asked.clear()
        await asyncio.sleep(1.1)
        assert [texts(each) for each in crowd.values()] == [["1"]] * 100
        assert not feed.circuit.is_open
        assert len(asked) < 2 * MOST_QUESTIONS
        await asyncio.gather(*(each.stop() for each in crowd.values()))


@simulated(1)
async def test_an_outage_while_ends_are_looked_for_one_by_one_is_an_outage(store):
    async with Feed(store) as feed:

        async def told(streams):
            if len(streams) > 1:
                raise CorruptRecordError("one of these cannot be read")
            raise StoreUnavailableError("and now it is down")

        feed.log.heads = told
        crowd = [Following(feed, name) for name in ("a", "b")]
        await asyncio.sleep(2)
        assert "it is down" in feed.circuit.error
        await asyncio.gather(*(each.stop() for each in crowd))


@simulated(1)
async def test_a_log_that_can_tell_no_ends_at_all_is_not_asked_for_each(store):
    async with Feed(store) as feed:
        asked = 0

        async def told(streams):
            nonlocal asked
            asked += 1
            raise CorruptRecordError("none of these can be read")

        feed.log.heads = told
        crowd = [Following(feed, f"s{n}") for n in range(200)]
        await asyncio.sleep(1)
        assert "none of these" in feed.circuit.error
        assert asked == MOST_QUESTIONS
        await asyncio.gather(*(each.stop() for each in crowd))


@simulated(1)
async def test_what_is_no_name_of_a_stream_is_refused_at_once(store):
    async with Feed(store) as feed:
        for name in ("", "x" * 256, "\ud800", "a\0b"):
            with pytest.raises(SettingsError):
                await anext(feed.subscribe(name))
            with pytest.raises(SettingsError):
                feed.follow(name)
        assert len(feed) == 0


@simulated()
async def test_closing_the_feed_ends_every_loop(store):
    feed = Feed(store)
    following = [Following(feed), Following(feed, "scan:job:8")]
    await asyncio.sleep(0.5)
    await feed.aclose()
    for each in following:
        await each.until(lambda f: f.over)
    with pytest.raises(RuntimeError, match="closed"):
        feed.follow(STREAM)


# --- holes --------------------------------------------------------------------------------------


@simulated()
async def test_who_has_a_cursor_that_leads_nowhere_is_told_why_and_goes_on(store):
    await store.fill(range(1, 11))
    await store.fill(range(1, 3), "scan:job:8")
    page = await store.inner._log.read(STREAM)
    await store.trim(4)
    theirs = (await store.inner._log.read("scan:job:8")).head
    cursors = {
        "trimmed": page.entries[1].position,
        "ahead": Position(11, "0123456789ab"),
        "forked": Position(7, "0123456789ab"),
        "unreadable": "garbage",
    }
    async with Feed(store) as feed:
        crowd = {reason: Following(feed, after=after) for reason, after in cursors.items()}
        crowd["trimmed "] = Following(feed)
        crowd["trimmed  "] = Following(feed, after=theirs)  # of another stream
        for each in crowd.values():
            await each.until(lambda f: f.told)
        await store.append("11")
        for reason, each in crowd.items():
            await each.until(lambda f: len(f.told) == 2)
            assert texts(each) == [reason.strip(), "11"]
            assert each.told[0].snapshot.position == page.head
            await each.stop()


@simulated()
async def test_a_cursor_of_another_history_is_found_out_also_where_its_offset_is_at_hand(store):
    await store.fill(range(1, 11))
    async with Feed(store) as feed:
        live = Following(feed)
        await live.until(lambda f: len(f.told) == 10)
        for offset in (0, 7, 10):
            following = Following(feed, after=Position(offset, "0123456789ab"))
            await following.until(lambda f: f.told)
            assert texts(following) == ["forked"]
            await following.stop()
        await live.stop()


@simulated()
async def test_the_last_trimmed_position_is_not_lost(store):
    await store.fill(range(1, 11))
    page = await store.inner._log.read(STREAM)
    await store.trim(4)
    async with Feed(store) as feed:
        following = Following(feed, after=page.entries[3].position)
        await following.until(lambda f: len(f.told) == 6)
        assert texts(following) == numbers(5, 10)
        await following.stop()


@simulated()
async def test_who_has_missed_too_much_gets_the_state_instead(store):
    await store.fill(range(1, REPLAY_MOST + 2))
    first = (await store.inner._log.read(STREAM, limit=1)).entries[0].position
    async with Feed(store) as feed:
        just = Following(feed, after=first)
        over = Following(feed)
        await just.until(lambda f: len(f.told) == REPLAY_MOST)
        await over.until(lambda f: f.told)
        assert texts(just) == numbers(2, REPLAY_MOST + 1)
        assert texts(over) == ["overrun"]
        for each in (just, over):
            await each.stop()


@simulated(*range(6))
async def test_after_a_failover_that_lost_entries_everybody_who_had_them_is_told_once(store):
    await store.fill(range(1, 6))
    replica = store.copied()
    async with Feed(store) as feed:
        crowd = [Following(feed) for _ in range(5)]
        await store.fill(range(6, 9))  # acknowledged, and lost
        for each in crowd:
            await each.until(lambda f: len(f.told) == 8)
        store.fail_over(replica)
        await store.fill(["6b", "7b", "8b"])  # the same offsets again
        for each in crowd:
            await each.until(lambda f: any(isinstance(news, Reset) for news in f.told))
        await store.append("9b")
        for each in crowd:
            await each.until(lambda f: texts(f)[-1] == "9b")
            assert_whole(each)
            behind = list(itertools.dropwhile(lambda t: t != "forked", texts(each)))
            assert behind == ["forked", *[t for t in ("7b", "8b") if t in behind], "9b"]
        assert store.asked["load"] <= 2
        await asyncio.gather(*(each.stop() for each in crowd))


@simulated()
async def test_after_a_failover_without_loss_nobody_is_told_anything(store):
    await store.fill(range(1, 6))
    async with Feed(store) as feed:
        following = Following(feed)
        await following.until(lambda f: len(f.told) == 5)
        store.fail_over(store.copied())
        await asyncio.sleep(3)
        await store.append("6")
        await following.until(lambda f: len(f.told) == 6)
        assert texts(following) == numbers(1, 6)
        await following.stop()


@simulated()
async def test_a_state_that_a_failover_took_back_is_not_told_again(store):
    """Loaded for somebody, and gone before the reader itself had come so far."""
    await store.fill(range(1, 4))
    replica = store.copied()
    async with Feed(store) as feed:
        first = Following(feed)
        await first.until(lambda f: len(f.told) == 3)
        log, load = store.inner._log, store.inner._log.load

        async def load_before_a_failover(stream):
            snapshot = await load(stream)
            log.load = load
            store.fail_over(replica)
            return snapshot

        store.is_deaf, log.load = True, load_before_a_failover
        await store.fill(range(4, 7))
        lost = Following(feed, after="no cursor")
        await lost.until(lambda f: len(f.told) >= 2)
        await asyncio.sleep(10)
        assert [news.snapshot.position.offset for news in lost.told] == [6, 3]
        await store.append("4b", ends=True)
        for following in (first, lost):
            await following.until(lambda f: f.over)
        assert texts(lost)[-2:] == ["4b", "end"]


@simulated()
async def test_a_second_failover_before_the_first_was_told_holds_nobody_up(store):
    """The state that was just read is of a history that is over, too."""
    await store.fill(range(1, 4))
    first, second = store.copied(), store.copied()
    log = store.inner._log
    load = log.load

    async def load_before_the_next_one(stream):
        snapshot = await load(stream)
        log.load = load
        store.fail_over(second)
        return snapshot

    async with Feed(store) as feed:
        following = Following(feed)
        await store.fill(range(4, 7))
        await following.until(lambda f: len(f.told) == 6)
        log.load = load_before_the_next_one
        store.fail_over(first)
        await store.append("4b")
        await following.until(lambda f: log.load == load)
        await store.append("4c")
        await following.until(lambda f: sum(isinstance(news, Reset) for news in f.told) == 2)
        await store.append("5c")
        await following.until(lambda f: texts(f)[-1] == "5c")
        assert_whole(following)
        await following.stop()


@simulated()
async def test_an_end_that_a_failover_took_back_holds_up_nobody_who_comes_after_it(store):
    await store.fill(range(1, 4))
    replica = store.copied()
    async with Feed(store) as feed:
        first = Following(feed)
        await store.append("4", ends=True)
        await first.until(lambda f: f.over)
        store.fail_over(replica)
        await store.append("4b")
        late, lost = Following(feed, after="4.aaaaaaaaaaaa"), Following(feed, after="no cursor")
        for following in (late, lost):
            await following.until(lambda f: f.told)
        await store.append("5b", ends=True)
        for following in (late, lost):
            await following.until(lambda f: f.over)
        assert texts(late) == ["forked", "5b", "end"]
        assert texts(lost) == ["unreadable", "5b", "end"]


@simulated()
async def test_a_stream_that_vanished_is_told_as_gone_and_what_begins_anew_is_followed(store):
    await store.fill(range(1, 4))
    async with Feed(store) as feed:
        following = Following(feed)
        await following.until(lambda f: len(f.told) == 3)
        store.fail_over({})
        await following.until(lambda f: len(f.told) == 4)
        await store.append("1b")
        await following.until(lambda f: len(f.told) == 5)
        assert texts(following) == ["1", "2", "3", "gone", "1b"]
        await following.stop()


@simulated()
async def test_trimmed_past_the_reader_itself_there_is_one_reset_and_nobody_is_cut_off(store):
    await store.fill(range(1, 4))
    async with Feed(store) as feed:
        following = Following(feed)
        await following.until(lambda f: len(f.told) == 3)
        store.is_down = True
        await store.fill(range(4, 20))
        await store.trim(10)
        store.is_down = False
        await following.until(lambda f: len(f.told) >= 4)
        await store.append("20")
        await following.until(lambda f: texts(f)[-1] == "20")
        assert texts(following)[:4] == ["1", "2", "3", "trimmed"]
        assert_whole(following)
        await following.stop()


@pytest.mark.parametrize("made", [lambda path: FileStore(path / "records")])
def test_a_store_without_a_log_is_refused(made, tmp_path):
    with pytest.raises(SettingsError, match="log"):
        Feed(made(tmp_path))
