"""First result and replay are equal, of the same types; what would differ is refused."""

# ruff: noqa: DTZ001, DTZ901, N818, PYI024 - naive times and odd classes are what is tested

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import enum
import functools
import json
import math
import pathlib
import random
import socket
import string
import sys
import threading
import time as clock
import types
import uuid
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any, Generic, NamedTuple, TypeVar
from zoneinfo import ZoneInfo

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel.codec import (
    CODEC,
    DecodingError,
    EncodingError,
    decode_error,
    encode_error,
)
from semel.codec.plain import DEPTH
from semel.errors import ReplayedError, SemelError

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

T = TypeVar("T")


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"
    ROUGE = "red"  # noqa: PIE796


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Currency(enum.StrEnum):
    EUR = "eur"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Mode(enum.IntFlag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    y: int = 0


Pair = collections.namedtuple("Pair", "left right")


class Sticky(Point):
    pass


@dataclass
class Line:
    name: str
    amount: Decimal = Decimal(0)
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Receipt:
    id: uuid.UUID
    lines: tuple[Line, ...]
    total: Decimal = field(init=False, default=Decimal(1))


@dataclass
class Counted:
    count: int
    doubled: int = field(init=False)

    def __post_init__(self) -> None:
        self.count += 1
        self.doubled = self.count * 2
        self.note = "set in __post_init__"

    @functools.cached_property
    def lock(self) -> Any:
        return threading.Lock()


@dataclass
class Box(Generic[T]):
    item: T


@dataclass
class Gap:
    there: int
    missing: int = field(init=False)


@dataclass
class Bag(dict):
    size: int = 0


@dataclass
class Single:
    x: int = 0

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)


class Slots:
    __slots__ = ("__hidden", "seen")

    def hide(self, value: Any) -> Any:
        self.__hidden = value
        return self


@dataclass
class Below(Slots):
    x: int = 0


@dataclass
class Shown(Slots):
    seen: int = 0


class Address(pydantic.BaseModel):
    street: str
    zip: str | None = None


class Customer(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", frozen=True)

    name: str = pydantic.Field(alias="Name")
    address: Address
    others: list[Address] = []
    when: datetime | None = None
    _seen: int = pydantic.PrivateAttr(default=0)

    @pydantic.field_validator("name")
    @classmethod
    def shout(cls, value: str) -> str:
        return value + "!"


class Special(Address):
    door: int = 0


class Roots(pydantic.RootModel[list[int]]):
    pass


class Page(pydantic.BaseModel, Generic[T]):
    items: list[T]


class Fine(str):
    __slots__ = ()


class Nowhere(tzinfo):
    def utcoffset(self, dt):
        return timedelta(hours=1)

    def dst(self, dt):
        return None

    def tzname(self, dt):
        return "nowhere"


def same(a: Any, b: Any) -> bool:
    """Equal and of equal types, all the way down; NaN is NaN and -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return repr(a) == repr(b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, Decimal):
        return str(a) == str(b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same([*a.items()], [*b.items()])
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, (datetime, time)):
        return a.isoformat() == b.isoformat() and (a.fold, a.tzinfo) == (b.fold, b.tzinfo)
    if isinstance(a, (Line, Box)):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b


def there_and_back(value: Any) -> Any:
    return CODEC.decode(CODEC.encode(value))


# --- values that come back ----------------------------------------------------------------------

BERLIN = ZoneInfo("Europe/Berlin")

VALUES = [
    None,
    True,
    False,
    0,
    "",
    [],
    {},
    (),
    1,
    -1,
    2**63,
    -(2**64),
    10**5000,
    -(10**5000),
    2**2100,
    0.0,
    -0.0,
    0.1,
    1.0,
    1e308,
    5e-324,
    math.nan,
    math.inf,
    -math.inf,
    "text",
    "ünï¢ødé 😀",
    "\x00\x1f\x7f\u2028",
    "\ud800",
    "\ud83d\ude00",
    "$",
    '{"$":"tuple","v":[]}',
    [1, [2, [3, "x", None]]],
    {"a": 1, "b": {"c": [True, 1.5]}},
    {"$": "tuple", "v": [1]},
    {"$": 1},
    {"x": {"$": "set", "v": "$"}},
    {1: "int", "1": "str"},
    {None: 0, True: 1, 2.5: 2, (1, 2): 3, b"x": 4},
    {"\ud800": 1},
    {Colour.RED: 1, date(2024, 1, 1): 2, frozenset({1}): 3},
    (1, 2),
    (1,),
    ((), [()], {"t": (1, [2])}),
    {1, 2, 3},
    set(),
    frozenset({"a", 1, (1, 2)}),
    {frozenset({1}), frozenset()},
    b"",
    b"\x00\xff raw",
    bytearray(b"abc"),
    1 + 2j,
    complex(-0.0, math.inf),
    Decimal("1.0"),
    Decimal(1),
    Decimal("1E+400"),
    Decimal("-0"),
    Decimal("NaN"),
    Decimal("sNaN123"),
    Decimal("-Infinity"),
    Decimal("0.1") * Decimal("1E-30"),
    datetime(2024, 2, 29, 23, 59, 59, 999999),
    datetime(2024, 1, 1, tzinfo=UTC),
    datetime(2024, 1, 1, 12, tzinfo=timezone(timedelta(hours=5, minutes=45))),
    datetime(2024, 1, 1, tzinfo=timezone(-timedelta(hours=1, seconds=7, microseconds=3))),
    datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=1), "CET")),
    datetime(2024, 7, 1, tzinfo=BERLIN),
    datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN),
    datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=1),
    datetime(2024, 10, 27, 2, 30, fold=1),
    datetime(1, 1, 1),
    datetime.max,
    date(2024, 2, 29),
    time(1, 2, 3, 4),
    time(1, 2, tzinfo=UTC),
    time(1, 2, tzinfo=BERLIN, fold=1),
    timedelta(days=-1, microseconds=1),
    timedelta.max,
    uuid.UUID(int=0),
    uuid.uuid4(),
    Colour.RED,
    Colour.ROUGE,
    Level.HIGH,
    Currency.EUR,
    Right.READ,
    Right.READ | Right.WRITE,
    Right(0),
    Mode.A | Mode.B,
    Mode(8),
    [Level.LOW, 1, True, "eur", Currency.EUR],
    Point(1),
    Point((1, 2), [3]),
    Pair("l", {"r": ()}),
    Sticky(1, 2),
    Line("a", Decimal("1.50"), ["x"]),
    [Line("a"), {"deep": (Line("b"),)}],
    Receipt(uuid.UUID(int=7), (Line("a"), Line("b"))),
    Box[int](5),
    Box((1, 2)),
    Address(street="s"),
    Roots([1, 2]),
    Page[int](items=[1]),
    pathlib.PurePosixPath("/a/b"),
    pathlib.PureWindowsPath("C:/a"),
    pathlib.Path("rel/x"),
    pathlib.PurePosixPath("a\udcff"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_comes_back_as_it_was(value):
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_is_valid_json_for_any_reader(value):
    def refuse(name):
        raise AssertionError(name)

    sys.set_int_max_str_digits(640)
    try:
        json.loads(CODEC.encode(value).decode("utf-8", "strict"), parse_constant=refuse)
    finally:
        sys.set_int_max_str_digits(4300)


def test_plain_values_look_plain():
    assert CODEC.encode({"id": "ä", "n": [1, 1.5, None, True]}) == (
        '{"id":"ä","n":[1,1.5,null,true]}'.encode()
    )


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text().filter(lambda k: k != "$"), inner),
)


@relaxed
@given(plain_values)
def test_plain_values_are_what_json_makes_of_them(value):
    """However they are written: alone, in a small dict, in a large one."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert CODEC.encode(value) == text.encode()


def test_tags_are_readable():
    assert CODEC.encode((1, Decimal("1.5"))) == (b'{"$":"tuple","v":[1,{"$":"decimal","v":"1.5"}]}')


def test_equal_sets_are_equal_bytes():
    items = [f"item {n}" for n in range(50)]
    shuffled = random.Random(1).sample(items, 50)
    assert CODEC.encode(set(items)) == CODEC.encode(set(shuffled))


def test_a_dict_keeps_its_order():
    assert [*there_and_back({"b": 1, "a": 2})] == ["b", "a"]
    assert [*there_and_back({2: 1, 1: 2})] == [2, 1]


def test_the_result_is_a_copy():
    value = {"items": [1]}
    data = CODEC.encode(value)
    value["items"].append(2)
    assert CODEC.decode(data) == {"items": [1]}


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**2200), max_value=2**2200),
    st.floats(),
    st.text(),
    st.text(st.characters()),
    st.sampled_from(["$", "v", "type", "\ud800", "\ud83d\ude00"]),
    st.binary(),
    st.binary().map(bytearray),
    st.complex_numbers(),
    st.decimals(),
    st.datetimes(),
    st.datetimes(timezones=st.timezones()),
    st.datetimes(timezones=st.just(UTC)),
    st.dates(),
    st.times(),
    st.times(timezones=st.just(UTC)),
    st.timedeltas(),
    st.uuids(),
    st.sampled_from([*Colour, *Level, *Currency, *Right, Mode(3)]),
    st.sampled_from(["a", "/x/y", "."]).map(pathlib.PurePosixPath),
)
hashable = leaves.filter(
    lambda x: not isinstance(x, bytearray) and not (isinstance(x, Decimal) and x.is_snan())
)
keys = st.one_of(st.text(), st.sampled_from(["$", "v"]), hashable, st.tuples(hashable, hashable))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.sets(hashable, max_size=4),
        st.frozensets(hashable, max_size=4),
        st.builds(Point, inner, inner),
        st.builds(Line, inner, inner, inner),
        st.builds(Box, inner),
    ),
    max_leaves=15,
)


@relaxed
@given(values)
def test_any_value_comes_back(value):
    assert same(there_and_back(value), value)


@relaxed
@given(values)
def test_encoding_again_gives_the_same_bytes(value):
    data = CODEC.encode(value)
    assert CODEC.encode(CODEC.decode(data)) == data


# --- classes ------------------------------------------------------------------------------------


def test_post_init_does_not_run_again():
    first = Counted(1)
    again = there_and_back(first)
    assert (again.count, again.doubled, again.note) == (2, 4, "set in __post_init__")


def test_a_cached_property_is_computed_again():
    first = Counted(1)
    assert first.lock
    assert "lock" not in vars(there_and_back(first))


def test_pydantic_comes_back_without_validating_again():
    first = Customer(Name="Ada", address=Special(street="s", door=3), phone=(1, 2))
    first._seen = 7
    again = there_and_back(first)
    assert again == first
    assert again.name == "Ada!"
    assert again._seen == 7
    assert again.phone == (1, 2)
    assert type(again.address) is Special
    assert again.model_fields_set == first.model_fields_set
    assert again.model_dump_json() == first.model_dump_json()


def test_pydantic_that_was_never_validated_keeps_what_it_holds():
    odd = Address.model_construct(street=5)
    assert there_and_back(odd) == odd


@pytest.fixture
def module():
    made = types.ModuleType("semel_test_shop")
    sys.modules["semel_test_shop"] = made
    yield made
    del sys.modules["semel_test_shop"]


def in_module(module, kind, name="Thing"):
    kind.__module__, kind.__qualname__ = module.__name__, name
    setattr(module, name, kind)
    return kind


def test_a_class_that_is_not_loaded_is_named(module):
    data = CODEC.encode(in_module(module, dataclasses.make_dataclass("Thing", ["a"]))(1))
    del module.Thing
    with pytest.raises(DecodingError, match="semel_test_shop:Thing is not loaded here"):
        CODEC.decode(data)


def test_nothing_is_imported(module):
    data = CODEC.encode(in_module(module, dataclasses.make_dataclass("Thing", ["a"]))(1))
    absent = data.replace(b"semel_test_shop", b"wsgiref.util")
    sys.modules.pop("wsgiref.util", None)
    with pytest.raises(DecodingError, match="not loaded"):
        CODEC.decode(absent)
    assert "wsgiref.util" not in sys.modules


def test_a_module_getattr_is_not_asked(module):
    def loud(name):
        raise AssertionError(name)

    module.__getattr__ = loud
    with pytest.raises(DecodingError, match="not loaded"):
        CODEC.decode(b'{"$":"dataclass","type":"semel_test_shop:Lazy","v":{}}')


@pytest.mark.parametrize("tag", ["dataclass", "enum", "flag", "namedtuple", "pydantic"])
@pytest.mark.parametrize(
    "path", ["os:system", "builtins:object", "builtins:eval", "subprocess:Popen", "", ":", "os"]
)
def test_only_data_classes_are_rebuilt(tag, path):
    with pytest.raises(DecodingError):
        CODEC.decode(json.dumps({"$": tag, "type": path, "v": {}}).encode())


def test_new_fields_get_their_defaults(module):
    first = in_module(module, dataclasses.make_dataclass("Thing", ["a"]))(1)
    data = CODEC.encode(first)
    wider = [("a", int), ("b", int, 5), ("c", list, field(default_factory=list))]
    in_module(module, dataclasses.make_dataclass("Thing", wider))
    again = CODEC.decode(data)
    assert (again.a, again.b, again.c) == (1, 5, [])


@pytest.mark.parametrize("fields", [["a", "b"], ["b"], []])
def test_fields_that_came_or_went_without_a_default_are_named(module, fields):
    data = CODEC.encode(in_module(module, dataclasses.make_dataclass("Thing", ["a"]))(1))
    in_module(module, dataclasses.make_dataclass("Thing", fields))
    with pytest.raises(DecodingError, match=r"field '[ab]'.*version="):
        CODEC.decode(data)


def test_new_fields_of_a_named_tuple_and_a_model(module):
    in_module(module, collections.namedtuple("Thing", "a"))
    data = CODEC.encode(module.Thing(1))
    in_module(module, collections.namedtuple("Thing", "a b", defaults=[2]))
    assert CODEC.decode(data) == module.Thing(1, 2)
    data = CODEC.encode(in_module(module, pydantic.create_model("Model", a=int), "Model")(a=1))
    in_module(module, pydantic.create_model("Model", a=int, b=(int, 3)), "Model")
    assert CODEC.decode(data).b == 3
    in_module(module, pydantic.create_model("Model", a=int, b=(int, ...)), "Model")
    with pytest.raises(DecodingError, match="'b'"):
        CODEC.decode(data)


def test_a_member_that_went_is_named(module):
    in_module(module, enum.Enum("Thing", "A B"))
    data = CODEC.encode(module.Thing.A)
    in_module(module, enum.Enum("Thing", "B C"))
    with pytest.raises(DecodingError, match="no member 'A'"):
        CODEC.decode(data)


def test_an_enum_that_became_something_else_is_named(module):
    in_module(module, enum.Enum("Thing", "A"))
    data = CODEC.encode(module.Thing.A)
    in_module(module, dataclasses.make_dataclass("Thing", ["a"]))
    with pytest.raises(DecodingError, match="is not an enum"):
        CODEC.decode(data)


# --- refusals -----------------------------------------------------------------------------------


def cyclic_list():
    value: list[Any] = []
    value.append(value)
    return value


def cyclic_dict():
    value: dict[str, Any] = {}
    value["self"] = [value] * 10
    return value


def nested(depth, make=lambda inner: [inner]):
    value: Any = 1
    for _ in range(depth):
        value = make(value)
    return value


def local_dataclass():
    @dataclass
    class Local:
        x: int = 1

    return Local()


def odd_namedtuple():
    value = Sticky(1, 2)
    value.more = 3
    return value


REFUSED = [
    (collections.OrderedDict(a=1), "plain dict"),
    (collections.defaultdict(list), "plain dict"),
    (collections.Counter("a"), "plain dict"),
    (Fine("x"), "plain str"),
    (type("Ints", (int,), {})(1), "plain int"),
    (type("Floats", (float,), {})(1), "plain float"),
    (type("Lists", (list,), {})(), "plain list"),
    (type("Tuples", (tuple,), {})(), "plain tuple"),
    (type("Sets", (set,), {})(), "plain set"),
    (type("Bytes", (bytes,), {})(), "plain bytes"),
    (type("Moment", (datetime,), {})(2024, 1, 1), "plain datetime"),
    (type("Ident", (uuid.UUID,), {})(int=1), "plain UUID"),
    (clock.gmtime(), "plain tuple"),
    (object(), "return plain data"),
    (memoryview(b"x"), "return plain data"),
    (range(3), "return plain data"),
    ((n for n in ()), "return plain data"),
    (len, "return plain data"),
    (int, "return plain data"),
    (ValueError("x"), "return plain data"),
    (collections.deque(), "return plain data"),
    (datetime(2024, 1, 1, tzinfo=Nowhere()), "use zoneinfo"),
    (local_dataclass(), "at the top of a module"),
    (Bag(), "built-in base"),
    (Single(), "__new__"),
    (Below().hide(3), "more than its fields"),
    (Shown().hide(3), "more than its fields"),
    (Gap(1), "its field 'missing' has no value"),
    (odd_namedtuple(), "more than its fields"),
    (cyclic_list(), "contains itself"),
    (cyclic_dict(), "contains itself"),
    (nested(DEPTH + 1), "contains itself or is nested deeper"),
    (nested(DEPTH + 1, lambda inner: {"a": inner}), "nested deeper"),
    (nested(DEPTH + 1, lambda inner: (inner,)), "nested deeper"),
    (nested(DEPTH + 1, Box), "nested deeper"),
    (nested(60, lambda inner: [inner, inner]), "contains itself, or"),
    (nested(60, lambda inner: {"a": inner, "b": inner}), "contains itself, or"),
    (nested(60, lambda inner: (inner, inner)), "contains itself, or"),
    (nested(60, lambda inner: Line(inner, inner)), "contains itself, or"),
    ([[0] * 100_000] * 100_000, "contains itself, or"),
    (["x" * 1_000_000] * 100_000, "characters"),
    ([{"k" * 1_000_000: 0}] * 100_000, "characters"),
    ([10**4000] * 100_000, "characters"),
    ([(), *["x" * 1_000_000] * 100_000], "characters"),
    ([b"x" * 1_000_000] * 100_000, "characters"),
    ([1 << 8_000_000] * 100_000, "characters"),
    ([Decimal("1" * 1_000_000)] * 100_000, "characters"),
    ({n * (2**61 - 1) for n in range(200)}, "hash"),
    (datetime(2026, 1, 1, tzinfo=timezone(timedelta(microseconds=-500_000))), "whole seconds"),
]


@pytest.mark.parametrize(("value", "says"), REFUSED, ids=lambda value: type(value).__name__)
def test_refused_with_advice(value, says):
    with pytest.raises(EncodingError, match=says) as caught:
        CODEC.encode(value)
    assert str(caught.value).startswith("result")
    assert "or give codec=" in str(caught.value)
    assert isinstance(caught.value, SemelError)
    assert isinstance(caught.value, TypeError)


def test_slots_that_are_fields_or_empty_come_back():
    for value in (Below(1), Shown(2), Receipt(uuid.UUID(int=1), ())):
        assert there_and_back(value) == value


def test_many_values_and_long_ones_come_back():
    for value in (
        list(range(300_000)),
        {str(n): [n] for n in range(100_000)},
        [("x" * 10_000_000), b"y" * 10_000_000],
        set(range(10_000)),
        {(n, str(n)) for n in range(1000)},
    ):
        assert there_and_back(value) == value


def test_the_deepest_value_comes_back():
    for make in (lambda inner: [inner], lambda inner: (inner,), Box, lambda inner: {1: inner}):
        value = nested(DEPTH, make)
        assert there_and_back(value) == value


def test_the_spot_is_named():
    with socket.socket() as sock:
        value = {"items": [1, 2, (0, Line("x", tags=[{3: sock}]))]}
        with pytest.raises(EncodingError) as caught:
            CODEC.encode(value)
    assert str(caught.value).startswith(
        "result[\"items\"][2][1].tags[0][3]: <class 'socket.socket'> cannot be stored; return"
    )


def test_the_spot_shows_no_value_and_no_endless_key():
    with pytest.raises(EncodingError) as caught:
        CODEC.encode({"k" * 1000: {(1, "secret"): object()}})
    assert 'result["kkkk' in str(caught.value)
    assert "[<tuple>]" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_a_value_that_raises_when_read_is_an_encoding_error(module):
    def broken(self):
        raise RuntimeError("no")

    kind = in_module(module, dataclasses.make_dataclass("Thing", ["a"]))
    thing = kind(1)
    kind.a = property(broken)
    with pytest.raises(EncodingError, match="RuntimeError: no"):
        CODEC.encode(thing)


def test_near_the_recursion_limit_nothing_else_is_raised():
    def dive(depth):
        if depth:
            return dive(depth - 1)
        return CODEC.encode(nested(60, lambda inner: (inner,)))

    frames = sys.getrecursionlimit() - len_of_stack() - 60
    with pytest.raises(EncodingError):
        dive(frames)


def len_of_stack():
    frame, count = sys._getframe(), 0
    while frame:
        frame, count = frame.f_back, count + 1
    return count


# --- hostile bytes ------------------------------------------------------------------------------

HOSTILE = [
    b"",
    b" ",
    b"\xff\xfe",
    b"\xef\xbb\xbf1",
    b"{",
    b"[1,",
    b"nul",
    b"1 2",
    b"1\n",
    b"NaN",
    b"[Infinity]",
    b'"\\ud8',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"$":"tuple","v":' * 10_000,
    b"9" * 5000,
    b'{"$":null}',
    b'{"$":[]}',
    b'{"$":{}}',
    b'{"$":"nonsense"}',
    b'{"$":"tuple"}',
    b'{"$":"tuple","v":"ab"}',
    b'{"$":"set","v":[[]]}',
    b'{"$":"set","v":[{"$":"decimal","v":"sNaN"}]}',
    b'{"$":"dict","v":[1]}',
    b'{"$":"dict","v":[[1,2,3]]}',
    b'{"$":"dict","v":[[[],1]]}',
    b'{"$":"bytes","v":"%%%"}',
    b'{"$":"bytes","v":"YQ=\xc3\xa4"}',
    b'{"$":"str","v":"/w=="}',
    b'{"$":"int","v":"xyz"}',
    b'{"$":"float","v":"abc"}',
    b'{"$":"complex","v":["a","b"]}',
    b'{"$":"complex","v":[1]}',
    b'{"$":"decimal","v":"one"}',
    b'{"$":"decimal","v":"1E+9999999999999999999999"}',
    b'{"$":"uuid","v":"x"}',
    b'{"$":"date","v":"2024-13-01"}',
    b'{"$":"datetime","v":"2024-02-30T00:00:00"}',
    b'{"$":"datetime","v":"2024-01-01T00:00:00","zone":"../../etc/passwd"}',
    b'{"$":"datetime","v":"2024-01-01T00:00:00","zone":"No/Where"}',
    b'{"$":"datetime","v":"2024-01-01T00:00:00","zone":""}',
    b'{"$":"datetime","v":"2024-01-01T00:00:00","zone":"Europe"}',
    b'{"$":"timedelta","v":[1e999,0,0]}',
    b'{"$":"timedelta","v":[99999999999,0,0]}',
    b'{"$":"timedelta","v":{}}',
    b'{"$":"path","type":"Path","v":"x"}',
    b'{"$":"path","type":"PurePosixPath","v":1}',
    b'{"$":"enum","type":"enum:Enum","v":"name"}',
    b'{"$":"dataclass","type":"sys:modules.os","v":{}}',
]


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: repr(data[:40]))
def test_hostile_bytes_are_a_decoding_error(data):
    with pytest.raises(DecodingError) as caught:
        CODEC.decode(data)
    assert isinstance(caught.value, SemelError)
    assert isinstance(caught.value, ValueError)


tokens = st.sampled_from(
    [b"{", b"}", b"[", b"]", b",", b":", b'"$"', b'"v"', b'"type"', b'"zone"', b"1", b"-", b"null"]
    + [b'"tuple"', b'"set"', b'"dict"', b'"datetime"', b'"dataclass"', b'"enum"', b'"flag"']
    + [b'"decimal"', b'"bytes"', b'"pydantic"', b'"namedtuple"', b'"2024-01-01"', b"\xff", b"\\"]
    + [f'"{__name__}:{name}"'.encode() for name in ("Line", "Point", "Colour", "Address", "Mode")]
)

trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(string.printable),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["v", "type", "set", "zone", "more", "a"]), inner)
        | st.fixed_dictionaries(
            {
                "$": st.sampled_from(
                    [
                        "int",
                        "float",
                        "str",
                        "dict",
                        "tuple",
                        "set",
                        "frozenset",
                        "bytes",
                        "bytearray",
                        "complex",
                        "decimal",
                        "uuid",
                        "date",
                        "datetime",
                        "time",
                        "timedelta",
                        "path",
                        "enum",
                        "flag",
                        "namedtuple",
                        "dataclass",
                        "pydantic",
                        "x",
                    ]
                ),
                "v": inner,
            },
            optional={
                "type": st.sampled_from(
                    [f"{__name__}:{n}" for n in ("Line", "Receipt", "Point", "Colour", "Mode")]
                    + [f"{__name__}:Customer", "os:system", "PosixPath", "WindowsPath"]
                ),
                "set": inner,
                "more": inner,
                "extra": inner,
                "zone": inner,
                "name": inner,
                "fold": inner,
            },
        )
    ),
    max_leaves=8,
)


def decode_or_refuse(data):
    for read in (CODEC.decode, decode_error):
        with contextlib.suppress(DecodingError):
            read(data)


@relaxed
@given(st.binary())
def test_fuzz_bytes(data):
    decode_or_refuse(data)


@relaxed
@given(st.lists(tokens).map(b"".join))
def test_fuzz_tokens(data):
    decode_or_refuse(data)


@settings(relaxed, max_examples=200)
@given(trees)
def test_fuzz_trees(tree):
    decode_or_refuse(json.dumps(tree).encode())


@relaxed
@given(values, st.data())
def test_fuzz_cut_and_flipped(value, data):
    raw = bytearray(CODEC.encode(value))
    at = data.draw(st.integers(0, len(raw) - 1))
    decode_or_refuse(bytes(raw[:at]))
    raw[at] ^= data.draw(st.integers(1, 255))
    decode_or_refuse(bytes(raw))


def test_a_huge_decimal_is_cheap():
    value = {Decimal("1E+999999"), Decimal("1E-999999")}
    assert there_and_back(value) == value


COLLIDING = ",".join(str(n * (2**61 - 1)) for n in range(2000))


@pytest.mark.parametrize(
    "stored",
    [
        '{"$":"set","v":[%s]}',
        '{"$":"frozenset","v":[%s]}',
        '{"$":"set","v":[{"$":"tuple","v":[%s]}]}'.replace(
            "[%s]", "[" + COLLIDING.replace(",", ']},{"$":"tuple","v":[') + "]"
        ),
        '{"$":"dict","v":[[%s]]}'.replace("%s", COLLIDING.replace(",", ",0],[") + ",0"),
        f'{{"$":"pydantic","type":"{__name__}:Address","v":{{"street":""}},"set":[%s]}}',
    ],
    ids=["set", "frozenset", "tuples", "dict", "pydantic"],
)
def test_stored_members_made_to_collide_are_refused(stored):
    """Each would be compared with each: seconds for a few hundred kilobytes."""
    with pytest.raises(DecodingError, match="hash"):
        CODEC.decode(stored.replace("%s", COLLIDING).encode())


# --- errors as outcomes -------------------------------------------------------------------------


class Declined(Exception):
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"declined: {reason} ({code})")
        self.code = code
        self.reason = reason


class Plain(Exception):
    pass


class Spoken(Exception):
    def __init__(self, who: str) -> None:
        self.who = who

    def __str__(self) -> str:
        return f"said {self.who}"


class Forgetful(Exception):
    def __init__(self, a, b, c):
        super().__init__(a)


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code):
        super().__init__("slotted")
        self.code = code


class Holding(Exception):
    def __init__(self, thing):
        super().__init__("holding")
        self.thing = thing


class Picky(Exception):
    def __new__(cls, a, b):
        return super().__new__(cls, a, b)

    def __init__(self, a, b):
        super().__init__("one")


class Fleeting(Exception):
    def __str__(self):
        return f"at {random.random()}"


class Broken(Exception):
    def __str__(self):
        raise RuntimeError("no message either")


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Stop(BaseException):
    pass


def replayed(error: BaseException) -> BaseException:
    return decode_error(encode_error(error))


def unicode_error():
    try:
        b"\xff".decode()
    except UnicodeDecodeError as error:
        return error


def missing_file():
    try:
        pathlib.Path("/no/such/file").read_bytes()
    except OSError as error:
        return error


def missing_module():
    try:
        import semel_no_such_module  # noqa: F401
    except ImportError as error:
        return error


REBUILT = [
    ValueError("x"),
    ValueError(),
    ValueError(1, "two", (3,), Decimal(4)),
    KeyError("k"),
    KeyError(("t", 1)),
    Plain("plain"),
    Plain(),
    Declined(402, reason="funds"),
    Spoken("hello"),
    Forgetful(1, 2, 3),
    OSError(2, "nope", "file.txt"),
    OSError("one"),
    ConnectionResetError(104, "reset"),
    TimeoutError(),
    json.JSONDecodeError("bad", "doc", 1),
    unicode_error(),
    missing_file(),
    missing_module(),
    Frozen(7),
    StopIteration(5),
    AssertionError("a"),
    Plain("with\ud800surrogate"),
    pydantic.errors.PydanticUserError("m", code=None),
]


@pytest.mark.parametrize("error", REBUILT, ids=lambda error: type(error).__name__)
def test_an_error_comes_back(error):
    again = replayed(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)


def test_what_c_keeps_outside_of_args_comes_back():
    assert replayed(missing_file()).filename == "/no/such/file"
    assert replayed(missing_file()).errno == 2
    assert replayed(missing_module()).name == "semel_no_such_module"
    assert replayed(unicode_error()).start == 0
    assert replayed(StopIteration(5)).value == 5


FALLEN_BACK = [
    Slotted(1),
    Holding(object()),
    Picky(1, 2),
    Fleeting(),
    Broken(),
    ValueError(object()),
    type("Unknown", (Exception,), {})("gone"),
    ExceptionGroup("several", [ValueError("a"), KeyError("b")]),
    SystemExit(1),
    KeyboardInterrupt(),
    GeneratorExit(),
    type("Sub", (SystemExit,), {})(),
    asyncio.CancelledError(),
    Stop("stop"),
    BaseExceptionGroup("base", [KeyboardInterrupt()]),
]


@pytest.mark.parametrize("error", FALLEN_BACK, ids=lambda error: type(error).__name__)
def test_an_error_that_cannot_be_rebuilt_keeps_its_message(error):
    again = replayed(error)
    assert type(again) is ReplayedError
    assert again.type_path == f"{type(error).__module__}:{type(error).__qualname__}"
    if not isinstance(error, (Fleeting, Broken)):
        assert str(again) == str(error)


def test_notes_and_cause_come_back():
    error = Plain("p")
    error.add_note("a note")
    error.__cause__ = KeyError("why")
    again = replayed(error)
    assert again.__notes__ == ["a note"]
    assert type(again.__cause__) is ReplayedError
    assert (str(again.__cause__), again.__cause__.type_path) == ("'why'", "builtins:KeyError")


def test_a_group_names_its_parts():
    again = replayed(ExceptionGroup("several", [ValueError("a"), KeyError("b")]))
    assert again.__notes__ == ["builtins:ValueError: a", "builtins:KeyError: 'b'"]


def test_an_error_of_a_module_that_is_not_loaded(module):
    error = in_module(module, type("Thing", (Exception,), {}))("gone")
    data = encode_error(error)
    assert type(decode_error(data)) is module.Thing
    del module.Thing
    again = decode_error(data)
    assert (str(again), again.type_path) == ("gone", "semel_test_shop:Thing")


@pytest.mark.parametrize("path", ["os:system", "builtins:print", "builtins:object", "builtins:int"])
def test_only_exceptions_are_built(path):
    record = {"type": path, "message": "m", "args": ("x",), "given": ("x",), "state": {}}
    again = decode_error(CODEC.encode(record))
    assert type(again) is ReplayedError


@pytest.mark.parametrize(
    "state", [{"__class__": "x"}, {"__traceback__": 1}, {"__cause__": 1}, {"args": 1}]
)
def test_hostile_attributes_change_no_type(state):
    record = {"type": "builtins:ValueError", "message": "m", "args": ("m",), "given": ("m",)}
    again = decode_error(CODEC.encode(record | {"state": state}))
    assert type(again) in {ValueError, ReplayedError}


@pytest.mark.parametrize(
    "record",
    [
        1,
        [],
        {},
        {"type": 1, "message": "m"},
        {"type": "a:b"},
        {"type": "a:b", "message": 1},
        {"type": "a:b", "message": "m", "notes": 1},
        {"type": "a:b", "message": "m", "notes": [1]},
        {"type": "a:b", "message": "m", "cause": [1]},
    ],
)
def test_a_record_that_is_no_error_is_a_decoding_error(record):
    with pytest.raises(DecodingError):
        decode_error(CODEC.encode(record))


def test_a_replayed_error_can_be_stored_again():
    again = replayed(replayed(Holding(object())))
    assert type(again) is ReplayedError
    assert str(again) == "holding"
    assert again.type_path.endswith(":Holding")
