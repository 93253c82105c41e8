"""The part of the log's contract that is about one append: what it is answered, what it changes."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from semel.colour import Colour
from semel.entries import (
    Appended,
    Ended,
    Fenced,
    Field,
    FieldValue,
    Full,
    Keep,
    Mismatch,
    Position,
    Repeated,
    Replace,
    VersionConflict,
    beginning,
)
from semel.errors import SettingsError
from semel.ports import LogStore
from semel.stores.log_rules import following, mark_of, seal_of
from semel.testing.driven import Driven, InBothColours

STREAM = "job-1"
LARGEST = 2**53 - 1

# Names that an engine may take for one another: case, accents, spaces, what it cuts off, and what
# means something in keys and patterns. The first two look the same and are not.
ODD_NAMES = (
    "\u00e9",
    "e\u0301",
    "e",
    "a",
    "A",
    "a ",
    " a",
    "a\n",
    "a:b",
    "a:",
    ":a",
    "{a}",
    "{a}:b",
    "{}a",
    "a*",
    "a?b",
    "a%",
    "a_b",
    "a/../b",
    "'; --",
    "0",
    "00",
    "null",
    "\u2713 \U0001f600",
    "x" * 255,
    "x" * 254 + "y",
    "\u20ac" * 85,
)

REFUSED_NAMES = {
    "empty": "",
    "too long": "x" * 256,
    "too long in bytes": "\u20ac" * 85 + "x",
    "NUL": "a\0b",
    "half a letter": "\ud800",
}

# A bool is no number to a database, and whoever shares its batch would pay for it.
NO_NUMBERS = (True, 1.5, 1.0, "1")

ODD_BYTES = {
    "empty": b"",
    "NUL": b"\0a\0",
    "not UTF-8": bytes(range(256)),
    "a number": b"0",
    "1 MiB": b"\xff\0" * 2**19,
}


class _Name(enum.StrEnum):
    A = "a"


class _Number(enum.IntEnum):
    ONE = 1


def log_of(store: LogStore, colour: Colour) -> Any:
    log = store.log(colour)
    return Driven(log) if colour.name == "sync" else log


async def put(log: Any, id: str, data: bytes | None = b"x", **more: Any) -> Position:
    """Append to `STREAM` what must be taken; its position."""
    answer = await log.append(STREAM, data, id=id, **more)
    assert isinstance(answer, Appended), answer
    return answer.position


async def datas(log: Any, after: Position | None = None) -> list[bytes]:
    page = await log.read(STREAM, after)
    assert not page.lost
    return [entry.data for entry in page.entries]


class AppendingContract(InBothColours):
    """Ids, fences, versions, the state and the reply."""

    async def age(self, store: Any, seconds: float) -> None:
        """Make every stream of the store this much older; younger, if it is negative."""
        raise NotImplementedError

    @pytest.fixture
    def log(self, store: LogStore, colour: Colour) -> Any:
        return log_of(store, colour)

    # --- offsets and ids ----------------------------------------------------------------------

    async def test_offsets_are_1_2_3(self, log: Any) -> None:
        positions = [await put(log, f"e{n}", b"%d" % n) for n in range(5)]
        assert [p.offset for p in positions] == [1, 2, 3, 4, 5]
        page = await log.read(STREAM)
        assert [e.position for e in page.entries] == positions
        assert [(e.id, e.data) for e in page.entries] == [(f"e{n}", b"%d" % n) for n in range(5)]
        assert all(e.at_us > 1_500_000_000_000_000 for e in page.entries)

    async def test_a_repeated_id_gets_the_first_position_and_reply(self, log: Any) -> None:
        first = await put(log, "a", b"1", reply=b"done")
        await put(log, "b", b"2")
        again = await log.append(STREAM, b"1", id="a", reply=b"done again")
        assert again == Repeated(first, b"done")
        assert await datas(log) == [b"1", b"2"]

    async def test_a_repeat_changes_nothing(self, log: Any) -> None:
        await put(log, "a", state=Replace(b"1"), fences={"p": 1})
        await log.append(
            STREAM, b"x", id="a", state=Replace(b"2"), fences={"p": 9, "q": 9}, ends=True
        )
        await log.append(STREAM, b"x", id="a", state=Field("f", 1, b"2"))
        snapshot = await log.load(STREAM)
        assert (snapshot.state, dict(snapshot.fields), snapshot.life) == (b"1", {}, "open")
        await put(log, "b", fences={"p": 1, "q": 0})

    async def test_the_same_id_with_another_payload_is_refused(self, log: Any) -> None:
        await put(log, "a", b"1")
        assert await log.append(STREAM, b"2", id="a") == Mismatch("fingerprint")
        await put(log, "b", b"2")
        assert await log.append(STREAM, b"2", id="a") == Mismatch("fingerprint")
        await log.trim(STREAM, 2)
        assert await log.append(STREAM, b"2", id="a") == Mismatch("fingerprint")
        await put(log, "c", b"3", ends=True)
        assert await log.append(STREAM, b"2", id="a") == Mismatch("fingerprint")

    async def test_the_fingerprint_is_compared_instead_of_the_payload(self, log: Any) -> None:
        first = await put(log, "a", b"1", fingerprint=b"f")
        assert await log.append(STREAM, b"2", id="a", fingerprint=b"f") == Repeated(first)
        assert await log.append(STREAM, b"1", id="a", fingerprint=b"g") == Mismatch("fingerprint")
        assert await log.append(STREAM, b"1", id="a") == Mismatch("fingerprint")

    async def test_an_id_belongs_to_its_stream(self, log: Any) -> None:
        await put(log, "a", b"1")
        other = await log.append("job-2", b"2", id="a")
        assert isinstance(other, Appended)
        assert other.position.offset == 1

    async def test_a_repeat_hears_of_itself_whatever_came_between(self, log: Any) -> None:
        asked: dict[str, Any] = {"fences": {"p": 1}, "expect": 0, "keep": Keep(full=1)}
        first = await put(log, "a", b"1", reply=b"r", **asked)
        again = Repeated(first, b"r")
        assert await log.append(STREAM, b"1", id="a", **asked) == again  # full, and moved on
        await put(log, "b", fences={"p": 2})
        assert await log.append(STREAM, b"1", id="a", **asked) == again  # fenced
        await log.trim(STREAM, 2)
        await put(log, "c", ends=True)
        assert await log.append(STREAM, b"1", id="a", **asked) == again  # trimmed, and ended

    # --- a reply without an entry -------------------------------------------------------------

    async def test_without_data_a_reply_is_kept_and_no_offset_is_taken(self, log: Any) -> None:
        refused = await log.append(STREAM, None, id="r0", reply=b"not yet")
        assert refused == Appended(beginning(STREAM), b"not yet")
        head = await put(log, "a")
        refused = await log.append(STREAM, None, id="r1", reply=b"no")
        assert refused == Appended(head, b"no")
        assert await log.append(STREAM, None, id="r1") == Repeated(head, b"no")
        assert await log.append(STREAM, None, id="r0") == Repeated(beginning(STREAM), b"not yet")
        following = await put(log, "b")
        assert following.offset == 2
        assert await log.append(STREAM, b"late", id="r1") == Mismatch("fingerprint")
        assert len(await datas(log)) == 2

    async def test_without_data_the_state_changes_all_the_same(self, log: Any) -> None:
        await put(log, "a", None, state=Replace(b"s"), fences={"p": 2})
        snapshot = await log.load(STREAM)
        assert (snapshot.position, snapshot.state) == (beginning(STREAM), b"s")
        assert await log.append(STREAM, b"x", id="b", fences={"p": 1}) == Fenced("p", 2)

    # --- versions -----------------------------------------------------------------------------

    async def test_an_unexpected_version_appends_nothing(self, log: Any) -> None:
        first = await put(log, "a", expect=0)
        for expect in (0, 2):
            answer = await log.append(
                STREAM, b"y", id="b", expect=expect, state=Replace(b"s"), fences={"p": 5}
            )
            assert answer == VersionConflict(first)
        assert await log.append(STREAM, None, id="b", expect=0) == VersionConflict(first)
        snapshot = await log.load(STREAM)
        assert (snapshot.position, snapshot.state) == (first, None)
        assert (await put(log, "b", expect=1, fences={"p": 0})).offset == 2

    async def test_a_stream_that_is_not_there_has_version_0(self, log: Any) -> None:
        answer = await log.append(STREAM, b"x", id="a", expect=1)
        assert answer == VersionConflict(beginning(STREAM))
        assert (await log.read(STREAM)).life == "unknown"

    async def test_an_expected_position_is_of_one_history(self, log: Any) -> None:
        before = beginning(STREAM)
        assert await log.append(STREAM, b"x", id="a", expect=Position(0, "0" * 12)) == (
            VersionConflict(before)
        )
        first = await put(log, "a", expect=before)
        for other in (before, Position(1, "0" * 12), Position(2, first.tag), Position(1, "1")):
            answer = await log.append(STREAM, b"y", id="b", expect=other, state=Replace(b"s"))
            assert answer == VersionConflict(first)
        assert (await log.load(STREAM)).state is None
        assert (await put(log, "b", expect=first)).offset == 2

    async def test_a_sealed_position_is_of_one_content(self, log: Any) -> None:
        before = beginning(STREAM)
        sealed = await put(log, "a", seal=b"1")
        assert await log.append(STREAM, b"x", id="a", seal=b"2") == Repeated(sealed)
        plain = following(before, mark_of("a", b"x"))
        assert sealed == following(before, mark_of("a", b"x") + seal_of(b"1"))
        for other in (plain, following(before, mark_of("a", b"x") + seal_of(b"2"))):
            answer = await log.append(STREAM, b"y", id="b", expect=other)
            assert answer == VersionConflict(sealed)
            assert (await log.read(STREAM, other)).lost
        assert (await put(log, "b", expect=sealed)).offset == 2

    # --- numbers that must grow -----------------------------------------------------------------

    async def test_a_rising_number_is_taken_once(self, log: Any) -> None:
        first = await put(log, "a", rising={"c": 3})
        for late in (3, 2, 0):
            answer = await log.append(STREAM, b"z", id="b", rising={"c": late}, state=Replace(b"z"))
            assert answer == Fenced("c", 3)
        assert (await log.load(STREAM)).position == first
        assert await log.append(STREAM, b"x", id="a", rising={"c": 3}) == Repeated(first)
        assert (await put(log, "b", rising={"c": 4, "d": 0})).offset == 2
        assert await log.append(STREAM, b"x", id="c", rising={"d": 0}) == Fenced("d", 0)

    async def test_a_rising_number_is_taken_by_a_reply_without_an_entry(self, log: Any) -> None:
        await put(log, "a", None, reply=b"no", rising={"c": 1})
        assert await log.append(STREAM, b"x", id="b", rising={"c": 1}) == Fenced("c", 1)
        assert (await put(log, "c", rising={"c": 2})).offset == 1

    async def test_a_rising_number_is_remembered_when_its_id_is_forgotten(self, log: Any) -> None:
        forgetful = Keep(entries=1, ids_s=0.0)
        for n in range(1, 40):
            await put(log, f"a{n}", rising={"c": n}, keep=forgetful)
        for n in (1, 20, 39):
            assert await log.append(STREAM, b"x", id=f"again{n}", rising={"c": n}) == (
                Fenced("c", 39)
            )

    async def test_rising_numbers_and_fences_are_the_same_numbers(self, log: Any) -> None:
        await put(log, "a", rising={"p": 5}, fences={"q": 1})
        assert await log.append(STREAM, b"x", id="b", fences={"p": 4}) == Fenced("p", 5)
        assert (await put(log, "b", fences={"p": 5}, rising={"q": 2})).offset == 2

    # --- fences -------------------------------------------------------------------------------

    async def test_a_stale_fence_is_refused_and_changes_nothing(self, log: Any) -> None:
        first = await put(log, "a", fences={"p": 5, "q": 3})
        for stale in ({"p": 4}, {"q": 4, "p": 4}, {"new": 1, "p": 0}):
            answer = await log.append(
                STREAM, b"z", id="b", fences=stale, state=Replace(b"z"), ends=True
            )
            assert answer == Fenced("p", 5)
        snapshot = await log.load(STREAM)
        assert (snapshot.position, snapshot.state, snapshot.life) == (first, None, "open")
        assert (await put(log, "b", fences={"p": 5, "q": 3, "new": 0})).offset == 2

    async def test_a_larger_fence_shuts_the_smaller_one_out(self, log: Any) -> None:
        await put(log, "a", fences={"p": 9})
        await put(log, "b", fences={"p": LARGEST})
        assert await log.append(STREAM, b"x", id="c", fences={"p": 9}) == Fenced("p", LARGEST)
        await put(log, "c", fences={"p": LARGEST, "q": 0})
        await put(log, "d")

    async def test_fences_belong_to_their_stream(self, log: Any) -> None:
        await put(log, "a", fences={"p": 5})
        answer = await log.append("job-2", b"x", id="a", fences={"p": 1})
        assert isinstance(answer, Appended)

    # --- the state ----------------------------------------------------------------------------

    async def test_the_state_is_replaced(self, log: Any) -> None:
        await put(log, "a", state=Replace(b"1"))
        last = await put(log, "b", state=Replace(b"2"))
        await put(log, "c")
        snapshot = await log.load(STREAM)
        assert snapshot.state == b"2"
        assert snapshot.position.offset == last.offset + 1

    async def test_a_lower_rank_never_moves_the_state_back(self, log: Any) -> None:
        await put(log, "a", state=Field("vision", 5, b"five"))
        before = await log.load(STREAM)
        await put(log, "b", state=Field("vision", 4, b"four"))
        await put(log, "c", state=Field("vision", 5, b"five again"))
        await put(log, "d", state=Field("rule", 0, b"zero"))
        await put(log, "e", state=Replace(b"whole"))
        snapshot = await log.load(STREAM)
        assert dict(snapshot.fields) == {
            "vision": FieldValue(5, b"five"),
            "rule": FieldValue(0, b"zero"),
        }
        assert snapshot.state == b"whole"
        assert (before.state, list(before.fields)) == (None, ["vision"])
        assert len(await datas(log)) == 5

    async def test_a_larger_rank_moves_the_state_on(self, log: Any) -> None:
        for rank in (0, 9, 10, LARGEST - 1, LARGEST):
            await put(log, f"e{rank}", state=Field("f", rank, b"%d" % rank))
        snapshot = await log.load(STREAM)
        assert dict(snapshot.fields) == {"f": FieldValue(LARGEST, b"%d" % LARGEST)}

    # --- full ---------------------------------------------------------------------------------

    async def test_a_full_stream_takes_nothing_until_it_is_trimmed(self, log: Any) -> None:
        keep = Keep(full=2)
        for id in "ab":
            await put(log, id, keep=keep)
        assert await log.append(STREAM, b"x", id="c", keep=keep) == Full(2)
        assert isinstance(await log.append(STREAM, None, id="r", keep=keep), Appended)
        assert await log.trim(STREAM, 1) == 1
        assert (await put(log, "c", keep=keep)).offset == 3
        assert await log.append(STREAM, b"x", id="d", keep=Keep(full=1)) == Full(2)
        assert (await log.load(STREAM)).position.offset == 3

    async def test_the_first_reason_is_the_answer(self, log: Any) -> None:
        head = await put(log, "a", fences={"p": 2})
        asked: dict[str, Any] = {"id": "b", "expect": 7, "keep": Keep(full=1)}
        assert await log.append(STREAM, b"", fences={"p": 1}, **asked) == Fenced("p", 2)
        assert await log.append(STREAM, b"", **asked) == VersionConflict(head)
        assert await log.append(STREAM, b"", **asked | {"expect": 1}) == Full(1)
        head = await put(log, "z", ends=True)
        assert await log.append(STREAM, b"", fences={"p": 1}, **asked) == Fenced("p", 2)
        assert await log.append(STREAM, b"", **asked) == Ended(head)

    # --- names and bytes ----------------------------------------------------------------------

    async def test_odd_names_never_bleed_into_one_another(self, log: Any) -> None:
        for name in ODD_NAMES:
            data = name.encode()
            answer = await log.append(name, data, id="a", state=Replace(data), reply=data)
            assert answer == Appended(answer.position, data)
            assert answer.position.offset == 1
        for name in ODD_NAMES:
            page = await log.read(name)
            assert [e.data for e in page.entries] == [name.encode()]
            assert (await log.load(name)).state == name.encode()
        heads = await log.heads(ODD_NAMES)
        assert len({p.tag for p in heads}) == len(ODD_NAMES)

    async def test_odd_ids_fields_and_fences_never_bleed_into_one_another(self, log: Any) -> None:
        for number, name in enumerate(ODD_NAMES):
            state = Field(name, number, name.encode())
            await put(log, name, name.encode(), state=state, fences={name: number})
        for number, name in enumerate(ODD_NAMES):
            again = await log.append(STREAM, name.encode(), id=name)
            assert isinstance(again, Repeated)
            assert again.position.offset == number + 1
            if number:
                stale = await log.append(STREAM, b"", id="new", fences={name: number - 1})
                assert stale == Fenced(name, number)
        fields = (await log.load(STREAM)).fields
        assert {n: (f.rank, f.data) for n, f in fields.items()} == {
            name: (number, name.encode()) for number, name in enumerate(ODD_NAMES)
        }
        assert [e.id for e in (await log.read(STREAM)).entries] == list(ODD_NAMES)

    @pytest.mark.parametrize("name", REFUSED_NAMES.values(), ids=REFUSED_NAMES)
    async def test_a_name_that_no_store_can_keep_is_refused(self, log: Any, name: str) -> None:
        refused: list[tuple[str, str, dict[str, Any]]] = [
            (name, "a", {}),
            (STREAM, name, {}),
            (STREAM, "a", {"state": Field(name, 1, b"")}),
            (STREAM, "a", {"fences": {name: 1}}),
        ]
        for stream, id, more in refused:
            with pytest.raises(SettingsError):
                await log.append(stream, b"x", id=id, **more)
        with pytest.raises(SettingsError):
            await log.read(name)
        with pytest.raises(SettingsError):
            await log.load(name)
        with pytest.raises(SettingsError):
            await log.trim(name, 1)
        with pytest.raises(SettingsError):
            await log.heads([STREAM, name])
        assert (await log.read(STREAM)).life == "unknown"

    @pytest.mark.parametrize("number", [-1, LARGEST + 1, *NO_NUMBERS, None], ids=repr)
    async def test_a_number_that_no_store_can_count_is_refused(self, log: Any, number: Any) -> None:
        for more in ({"fences": {"p": number}}, {"state": Field("f", number, b"")}):
            with pytest.raises(SettingsError):
                await log.append(STREAM, b"x", id="a", **more)

    async def test_a_place_that_is_no_whole_number_is_refused(self, log: Any) -> None:
        await put(log, "a")
        for wrong in NO_NUMBERS:
            place: Any = Position(wrong, beginning(STREAM).tag)  # type: ignore[arg-type]
            with pytest.raises(SettingsError):
                await log.append(STREAM, b"x", id="b", expect=wrong)
            for upto in (wrong, place):
                with pytest.raises(SettingsError):
                    await log.trim(STREAM, upto)
            with pytest.raises(SettingsError):
                await log.read(STREAM, place)
        assert len(await datas(log)) == 1

    async def test_where_nothing_can_be_nothing_is(self, log: Any) -> None:
        head = await put(log, "a", b"1")
        for far, trimmed in ((-1, 0), (2**70, 1)):
            assert await log.append(STREAM, b"2", id="b", expect=far) == VersionConflict(head)
            assert (await log.read(STREAM, Position(far, head.tag))).lost
            assert await log.trim(STREAM, Position(far, head.tag)) == 0
            assert await datas(log) == [b"1"]
            assert await log.trim(STREAM, far) == trimmed

    async def test_a_limit_is_a_number_from_0_on(self, log: Any) -> None:
        await put(log, "a")
        for wrong in (-1, -5, *NO_NUMBERS, None):
            with pytest.raises(SettingsError):
                await log.read(STREAM, None, wrong)
            with pytest.raises(SettingsError):
                await log.sweep(wrong)
        for limit in (0, 1, 2**31, 2**63, 2**70):
            page = await log.read(STREAM, None, limit)
            assert (page.lost, len(page.entries)) == (False, min(limit, 1))
            assert await log.sweep(limit) == 0

    async def test_what_is_not_bytes_is_refused(self, log: Any) -> None:
        for data in (bytearray(b"x"), memoryview(b"x"), "x", 1):
            state: Any = (Replace(data), Field("f", 1, data))  # type: ignore[arg-type]
            keys = ({"data": data}, {"reply": data}, {"fingerprint": data})
            for more in (*keys, {"state": state[0]}, {"state": state[1]}):
                asked: dict[str, Any] = {"data": b"x", "fingerprint": b"", **more}
                with pytest.raises(SettingsError):
                    await log.append(STREAM, id="a", **asked)
        assert (await log.read(STREAM)).life == "unknown"

    async def test_names_and_numbers_may_be_those_of_an_enum(self, log: Any) -> None:
        field = Field(_Name.A, _Number.ONE, b"1")
        position = await put(log, _Name.A, fences={_Name.A: _Number.ONE}, state=field)
        assert [e.id for e in (await log.read(STREAM)).entries] == ["a"]
        assert dict((await log.load(STREAM)).fields) == {"a": FieldValue(1, b"1")}
        assert await log.append(STREAM, b"x", id="a", fences={"a": 0}) == Repeated(position)
        assert await log.append(STREAM, b"x", id="b", fences={"a": 0}) == Fenced("a", 1)

    @pytest.mark.parametrize("data", ODD_BYTES.values(), ids=ODD_BYTES)
    async def test_bytes_come_back(self, log: Any, data: bytes) -> None:
        position = await put(log, "a", data, reply=data, state=Replace(data), fingerprint=data)
        await put(log, "b", data, state=Field("f", 1, data))
        assert await datas(log) == [data, data]
        snapshot = await log.load(STREAM)
        assert snapshot.state == data
        assert snapshot.fields["f"].data == data
        again = await log.append(STREAM, b"", id="a", fingerprint=data)
        assert again == Repeated(position, data)
