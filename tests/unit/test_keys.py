"""Two calls have one key exactly when they are the same effect."""

# ruff: noqa: DTZ001, PYI024 - naive times and odd classes are what is tested

from __future__ import annotations

import asyncio
import collections
import enum
import functools
import hashlib
import inspect
import math
import os
import pathlib
import subprocess
import sys
import unicodedata
import uuid
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel.errors import SettingsError
from semel.keys import (
    AutoKey,
    Binder,
    Template,
    auto_key,
    canonical,
    canonical_call,
    child_key,
    fingerprint,
    identifier,
    identity,
    make_key,
    new_attempt,
    operation_of,
)

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


# --- identity -----------------------------------------------------------------------------------


def test_identity_is_the_hash_of_length_prefixed_parts():
    parts = (b"semel1", b"acme", b"sk")
    raw = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    assert identity("acme", b"sk") == hashlib.sha256(raw).digest()


def test_parts_do_not_run_into_one_another():
    assert identity("ab", b"c") != identity("a", b"bc")
    assert identity("a", b"b", b"c") != identity("a", b"bc")
    assert identity("a", b"b", b"") != identity("a", b"b")


@relaxed
@given(st.lists(st.binary(max_size=3), max_size=4), st.lists(st.binary(max_size=3), max_size=4))
def test_fingerprints_differ_with_their_parts(some, others):
    assert (fingerprint(*some) == fingerprint(*others)) == (some == others)
    assert len(fingerprint(*some)) == 32


def test_a_fingerprint_is_no_identity():
    assert fingerprint(b"", b"k") != identity("", b"k")


def ids(*keys):
    return {key.id for key in keys}


def test_what_is_part_of_a_key():
    assert len(ids(make_key("k"), make_key("k", operation="f"))) == 1
    different = [
        make_key("k"),
        make_key("k", tenant="t"),
        make_key("k", tenant="t2"),
        make_key("k", version="2"),
        make_key("k", operation="f", per_operation=True),
        make_key("k", operation="g", per_operation=True),
        make_key("k", operation="f", per_operation=True, version="2"),
        make_key("k", operation="2", per_operation=True),
        make_key("K"),
        make_key("k "),
        make_key(b"k"),
    ]
    assert len(ids(*different)) == len(different)


def test_nothing_is_normalised():
    composed, decomposed = "é", unicodedata.normalize("NFD", "é")
    assert make_key(composed).id != make_key(decomposed).id


def test_a_key_says_what_it_is():
    key = make_key("invoice:7", tenant="acme", operation="shop.pay")
    assert (key.text, key.tenant, key.operation, len(key.id)) == (
        "invoice:7",
        "acme",
        "shop.pay",
        32,
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ünï 😀", "ünï 😀"),
        ("a\ud800b", r"a\ud800b"),
        ("nul\x00", r"nul\x00"),
        ("line\nfeed", r"line\nfeed"),
        (b"raw", "raw"),
        (b"\xff\x00", r"\xff\x00"),
        ("ä".encode(), "ä"),
    ],
)
def test_odd_keys_are_shown_readably(text, shown):
    assert make_key(text).text == shown


@pytest.mark.parametrize("text", ["x" * 255, "ä" * 127, b"\x00" * 255, "\x00" * 255, "😀" * 63])
def test_shown_text_fits_a_column(text):
    assert 0 < len(make_key(text).text.encode()) <= 255


class Word(str, enum.Enum):  # noqa: UP042 - the older way to write it, with another __str__
    A = "a"


def test_a_str_enum_is_its_text():
    assert make_key(Word.A) == make_key("a")
    assert type(make_key(Word.A).text) is str


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must not be empty"),
        (b"", "must not be empty"),
        (None, "write it as text"),
        (7, "write it as text"),
        (uuid.UUID(int=1), "write it as text"),
        (bytearray(b"x"), "write it as text"),
        (["k"], "write it as text"),
        ("x" * 256, "at most 255 bytes"),
        ("ä" * 128, "at most 255 bytes"),
        (b"x" * 256, "at most 255 bytes"),
    ],
)
def test_a_key_that_is_none_is_refused(text, says):
    with pytest.raises(SettingsError, match=says):
        make_key(text)


@pytest.mark.parametrize(
    "settings",
    [
        {"tenant": "x" * 256},
        {"tenant": "ä" * 128},
        {"tenant": None},
        {"tenant": b"t"},
        {"tenant": "a\x00"},
        {"tenant": "\ud800"},
        {"version": 2},
        {"version": "v" * 256},
        {"per_operation": True},
    ],
)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(SettingsError):
        make_key("k", **settings)


def test_tenants_of_255_bytes_are_fine():
    assert make_key("k", tenant="ä" * 127 + "x").tenant


# --- canonical arguments ------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class Shade(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: Any
    y: Any = 0


Spot = collections.namedtuple("Spot", "x y")


@dataclass
class Order:
    id: Any
    lines: Any = ()


@dataclass
class Cart:
    id: Any
    lines: Any = ()


class SubOrder(Order):
    pass


@dataclass
class Traced:
    id: int
    trace: object = field(default=None, compare=False)


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: Any = 0


class PrivateModel(pydantic.BaseModel):
    a: Any = 0
    _private: Any = pydantic.PrivateAttr(default=0)


class OtherModel(pydantic.BaseModel):
    a: Any = 0


class EqualModel(OtherModel):
    def __eq__(self, other):
        return True

    __hash__ = None


@dataclass(eq=False)
class Identical:
    id: int


@dataclass(eq=False)
class Basket(list):
    name: str = ""


@dataclass
class Count(int):
    name: str = ""


@dataclass
class Folded:
    id: str

    def __eq__(self, other):
        return self.id.lower() == other.id.lower()

    __hash__ = None


class SubFolded(Order):
    def __eq__(self, other):
        return True

    __hash__ = None


class Noted(Order):
    def __init__(self, id, note):
        super().__init__(id)
        self.note = note


@dataclass
class Loaded:
    id: int

    def __post_init__(self):
        self.load = self.id * 2

    @functools.cached_property
    def twice(self):
        return self.id * 2


class Tagged(Order):
    __slots__ = ("tag",)


def tagged_order():
    order = Tagged(1)
    order.tag = "x"
    return order


@dataclass
class Remembering:
    id: int

    @functools.cached_property
    def twice(self):
        return self.id * 2


def remembering():
    value = Remembering(1)
    assert value.twice == 2
    return value


class Account:
    def __init__(self, number: Any) -> None:
        self.number = number

    def __idempotency_key__(self) -> Any:
        return self.number

    def close(self) -> None: ...


class Savings(Account):
    pass


class Silent:
    pass


def some_function() -> None: ...


def write(value: Any) -> bytes:
    return canonical(value, where="x")


BERLIN = ZoneInfo("Europe/Berlin")
PLUS_ONE = timezone(timedelta(hours=1))

ALL_DIFFERENT = [
    None,
    True,
    False,
    0,
    1,
    0.0,
    -0.0,
    1.0,
    1 + 0j,
    "1",
    "",
    "None",
    "true",
    "null",
    b"1",
    b"",
    bytearray(b"1"),
    math.nan,
    math.inf,
    -math.inf,
    "nan",
    10**5000,
    10**5000 + 1,
    2**64,
    float(2**64),
    "\ud800",
    "\\ud800",
    "é",
    "e\u0301",
    "$",
    [],
    (),
    {},
    set(),
    frozenset(),
    [1, 2],
    (1, 2),
    [2, 1],
    {1, 2},
    frozenset({1, 2}),
    [1, [2]],
    [[1], 2],
    ["1,2"],
    ["1", "2"],
    {1: "a"},
    {"1": "a"},
    {True: "a"},
    {1.0: "a"},
    {None: "a"},
    {"None": "a"},
    {"a": 1},
    {"a": None},
    {"$": "tuple", "v": [1, 2]},
    {"$": "dict", "v": []},
    [["a", 1]],
    [("a", 1)],
    Decimal(1),
    Decimal("1.0"),
    Decimal("1E+1"),
    Decimal(10),
    Decimal("NaN"),
    date(2024, 1, 1),
    "2024-01-01",
    datetime(2024, 1, 1),
    datetime(2024, 1, 1, fold=1),
    datetime(2024, 1, 1, tzinfo=UTC),
    datetime(2024, 1, 1, 1, tzinfo=PLUS_ONE),
    datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN),
    datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=1),
    time(1),
    time(1, tzinfo=UTC),
    timedelta(1),
    timedelta(seconds=1),
    uuid.UUID(int=1),
    str(uuid.UUID(int=1)),
    Colour.RED,
    Colour.GREEN,
    Shade.RED,
    Level.LOW,
    Right.READ,
    Right.READ | Right.WRITE,
    pathlib.PurePosixPath("a"),
    pathlib.PureWindowsPath("a"),
    pathlib.Path("a"),
    "a",
    Point(1, 2),
    Spot(1, 2),
    Order(1),
    Order("1"),
    Order(1, []),
    Cart(1),
    SubOrder(1),
    {"id": 1, "lines": ()},
    Model(a=1),
    Model(a=1, b=2),
    OtherModel(a=1),
    Account(1),
    Account("1"),
    Savings(1),
    some_function,
    Account,
    Savings,
    Account.close,
    len,
    int,
    "builtins:len",
]


def test_all_different():
    written = [write(value) for value in ALL_DIFFERENT]
    twins = [
        (ALL_DIFFERENT[written.index(data)], value)
        for value, data in zip(ALL_DIFFERENT, written, strict=True)
        if written.count(data) > 1
    ]
    assert len(set(written)) == len(written), twins


def test_all_different_inside_of_others():
    for wrap in (lambda x: [x], lambda x: {"k": x}, lambda x: (0, x), Order, Account):
        assert len({write(wrap(value)) for value in ALL_DIFFERENT}) == len(ALL_DIFFERENT)


EQUAL = [
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({1: "a", "1": "b"}, {"1": "b", 1: "a"}),
    ({"x": {"b": (1,), "a": 2}}, {"x": {"a": 2, "b": (1,)}}),
    ({"$": 1, "a": 2}, {"a": 2, "$": 1}),
    ({3, 1, 2}, {2, 3, 1}),
    (float("nan"), -float("nan")),
    (
        datetime(2024, 7, 1, tzinfo=BERLIN),
        datetime(2024, 7, 1, tzinfo=timezone(timedelta(hours=2))),
    ),
    (datetime(2024, 1, 1, tzinfo=UTC), datetime(2024, 1, 1, tzinfo=ZoneInfo("UTC"))),
    (Traced(1, object()), Traced(1, object())),
    (Identical(1), Identical(1)),
    (Remembering(1), remembering()),
    (Tagged(1), Tagged(1)),
    (Model(a=1, b=2, c=3), Model(c=3, b=2, a=1)),
    (Model(), Model(a=0)),
    (Colour.RED, Colour(1)),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_the_same_argument(one, other):
    assert write(one) == write(other)


def test_plain_and_walked_arguments_are_written_alike():
    assert write({"b": 1, "a": [2, None]}) == b'{"a":[2,null],"b":1}'
    assert write({"b": 1, "a": ()}) == b'{"a":{"$":"tuple","v":[]},"b":1}'


def test_sets_are_written_alike_in_every_process():
    source = (
        "from semel.keys import canonical;"
        "print(canonical({*'abcdefgh', b'x', (1, 'y')}, where='x').hex())"
    )
    seen = set()
    for seed in ("1", "2", "3"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        seen.add(subprocess.check_output([sys.executable, "-c", source], env=env))
    assert len(seen) == 1


def typed(value: Any) -> Any:
    """A value whose plain equality is that of types and values."""
    kind = type(value)
    if kind in {list, tuple} or kind in {Point, Spot}:
        return kind, tuple(typed(item) for item in value)
    if kind is dict:
        return kind, frozenset((typed(key), typed(item)) for key, item in value.items())
    if kind in {set, frozenset}:
        return kind, frozenset(typed(item) for item in value)
    if kind in {Order, Cart}:
        return kind, typed(value.id), typed(value.lines)
    if kind in {float, Decimal}:
        return kind, str(value)
    return kind, bytes(value) if kind is bytearray else value


few = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 2),
    st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf]),
    st.sampled_from(["", "0", "1", "a", "$", "v", "\ud800", "[]", '"']),
    st.sampled_from([b"", b"1", bytearray(b"1"), Decimal(1), Decimal("1.0")]),
    st.sampled_from([*Colour, *Shade, *Level, date(2024, 1, 1), uuid.UUID(int=1)]),
)
frozen_few = few.filter(lambda x: not isinstance(x, bytearray))
arguments = st.recursive(
    few,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(st.sampled_from(["a", "$", "v"]), inner, max_size=2),
        st.dictionaries(frozen_few, inner, max_size=2),
        st.sets(frozen_few, max_size=2),
        st.frozensets(frozen_few, max_size=2),
        st.builds(Point, inner, inner),
        st.builds(Spot, inner, inner),
        st.builds(Order, inner),
        st.builds(Cart, inner),
    ),
    max_leaves=4,
)


@settings(relaxed, max_examples=300)
@given(arguments, arguments)
def test_written_alike_exactly_when_the_same(one, other):
    assert (write(one) == write(other)) == (typed(one) == typed(other))


@relaxed
@given(st.dictionaries(st.text(max_size=2) | st.integers(-2, 2), arguments, max_size=4))
def test_the_order_of_a_dict_does_not_matter(value):
    assert write(value) == write(dict(reversed(value.items())))


def cyclic():
    value: list[Any] = []
    value.append(value)
    return value


def deep():
    value: Any = ()
    for _ in range(100):
        value = (value,)
    return value


def doubled(make):
    """A few lists that hold each other, and written out more than a disk can hold."""
    value: Any = 1
    for _ in range(60):
        value = make(value)
    return value


def test_a_parameter_that_comes_to_too_much_is_named():
    bomb = doubled(lambda inner: [inner, inner])
    with pytest.raises(SettingsError, match=r"^shop\.pay: parameter b: .* contains itself, or"):
        in_one_go(f1, AutoKey("shop.pay"), (1, bomb), {})


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Silent(),
        sys,
        lambda: None,
        Account(1).close,
        functools.partial(print),
        iter([]),
        (n for n in ()),
        range(3),
        memoryview(b"x"),
        collections.OrderedDict(a=1),
        collections.defaultdict(int),
        type("Text", (str,), {})("x"),
        ValueError("x"),
        list[int],
        type("Local", (), {}),
        Account(object()),
        Order(object()),
        {"deep": [(object(),)]},
        {Silent(): 1},
        cyclic(),
        deep(),
        Basket(["a"]),
        Count(1),
        Folded("a"),
        SubFolded(1),
        Noted(1, "x"),
        Loaded(1),
        tagged_order(),
        PrivateModel(),
        EqualModel(),
        doubled(lambda inner: [inner, inner]),
        doubled(lambda inner: (inner, inner)),
        ["x" * 1_000_000] * 100_000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_written_is_refused_by_name(value):
    with pytest.raises(SettingsError, match=r"(?s)^the_parameter.*cannot be part of a key.*key="):
        canonical(value, where="the_parameter")


def test_the_refusal_names_the_spot_and_shows_no_value():
    with pytest.raises(SettingsError) as caught:
        canonical({"items": [Order(id="secret", lines=(Silent(),))]}, where="cart")
    assert str(caught.value).startswith('cart["items"][0].lines[0]: ')
    assert "Silent" in str(caught.value)
    assert "__idempotency_key__" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_object_that_fails_to_name_itself_says_so():
    class Failing:
        def __idempotency_key__(self):
            raise LookupError("no number yet")

    with pytest.raises(LookupError, match="no number yet"):
        write(Failing())


def test_hash_and_repr_are_never_asked():
    class Loud:
        def __hash__(self):
            raise AssertionError

        def __repr__(self):
            raise AssertionError

        __str__ = __repr__

    with pytest.raises(SettingsError):
        write([Loud()])


# --- binding ------------------------------------------------------------------------------------


def f0():
    return locals()


def f1(a, b, c=3):
    return locals()


def f2(a, /, b=2, *, c, d=4):
    return locals()


def f3(a, *rest, b=1, **more):
    return locals()


def f4(*args, **kwargs):
    return locals()


def f5(*, only):
    return locals()


def f6(a=1, /, *, a2=2, **a3):
    return locals()


CALLS = [
    ((), {}),
    ((1,), {}),
    ((1, 2), {}),
    ((1, 2, 3), {}),
    ((1, 2, 3, 4), {}),
    ((), {"a": 1}),
    ((), {"a": 1, "b": 2}),
    ((1,), {"b": 2}),
    ((1,), {"c": 3}),
    ((1,), {"c": 3, "d": 5}),
    ((1, 2), {"c": 3}),
    ((1, 2), {"a": 3}),
    ((1,), {"zzz": 3}),
    ((), {"only": 1}),
    ((), {"b": 2, "a": 1, "c": 0}),
]


@pytest.mark.parametrize("fn", [f0, f1, f2, f3, f4, f5, f6])
@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_binds_as_the_function_does(fn, args, kwargs):
    binder = Binder(fn)
    assert outcome(lambda: binder.bind(args, kwargs)) == outcome(lambda: fn(*args, **kwargs))
    assert binder.names == tuple(inspect.signature(fn).parameters)


def outcome(call):
    try:
        return call()
    except TypeError as error:
        return str(error)


def test_binding_runs_nothing():
    def explode(a):
        raise AssertionError

    assert Binder(explode).bind((1,), {}) == {"a": 1}


def test_spelling_does_not_matter_to_the_key():
    binder = Binder(f1)
    spellings = [
        ((1, 2), {}),
        ((1, 2, 3), {}),
        ((1,), {"c": 3, "b": 2}),
        ((), {"c": 3, "b": 2, "a": 1}),
    ]
    assert len({auto_key("f1", binder.bind(*spelling)) for spelling in spellings}) == 1


def test_defaults_are_the_very_objects():
    marker = object()

    def fn(a=marker, *, b=marker): ...

    assert all(value is marker for value in Binder(fn).bind((), {}).values())


def test_keyword_order_of_var_keywords_does_not_matter_to_the_key():
    binder = Binder(f4)
    assert auto_key("f", binder.bind((), {"a": 1, "b": 2})) == auto_key(
        "f", binder.bind((), {"b": 2, "a": 1})
    )


def test_a_missing_argument_is_not_none():
    binder = Binder(f4)
    assert auto_key("f", binder.bind((), {})) != auto_key("f", binder.bind((), {"a": None}))
    assert auto_key("f", binder.bind((), {})) != auto_key("f", binder.bind((None,), {}))


class Shop:
    def pay(self, amount): ...

    @classmethod
    def open(cls, name): ...

    def __call__(self, order): ...

    def _hidden(self, __private=1): ...  # noqa: PYI063


def test_methods_know_their_object():
    shop = Shop()
    assert Binder(Shop.pay).self_name == "self"
    assert Binder(Shop.pay).bind((shop, 1), {}) == {"self": shop, "amount": 1}
    assert Binder(shop.pay).bind((1,), {}) == {"self": shop, "amount": 1}
    assert Binder(Shop.open).self_name == "cls"
    assert Binder(Shop.open).bind(("x",), {}) == {"cls": Shop, "name": "x"}
    assert Binder(shop).bind((1,), {}) == {"self": shop, "order": 1}
    assert Binder(shop._hidden).bind((), {}) == {"self": shop, "_Shop__private": 1}


def test_a_function_that_is_no_method_has_no_self():
    def pay(self, amount): ...

    assert Binder(pay).self_name is None
    assert Binder(f1).self_name is None
    assert Binder(f0).self_name is None


def test_a_bad_call_of_a_method_reads_like_pythons():
    with pytest.raises(TypeError) as own:
        Shop().pay()
    with pytest.raises(TypeError) as ours:
        Binder(Shop().pay).bind((), {})
    assert str(ours.value) == str(own.value)


def test_a_partial_counts_with_what_it_holds():
    one, two = functools.partial(f1, 1, c=5), functools.partial(f1, 2, c=5)
    assert Binder(one).bind((9,), {}) == {"a": 1, "b": 9, "c": 5}
    assert Binder(one).bind((9,), {"c": 6}) == {"a": 1, "b": 9, "c": 6}
    assert Binder(functools.partial(one, 7)).bind((), {}) == {"a": 1, "b": 7, "c": 5}
    assert auto_key("f", Binder(one).bind((9,), {})) != auto_key("f", Binder(two).bind((9,), {}))
    assert Binder(functools.partial(Shop().pay, 3)).bind((), {})["amount"] == 3


def test_wrapped_functions_bind_as_what_they_wrap():
    @functools.wraps(f1)
    def wrapper(*args, **kwargs): ...

    assert Binder(wrapper).bind((1, 2), {}) == {"a": 1, "b": 2, "c": 3}
    assert Binder(functools.cache(f1)).bind((1, 2), {}) == {"a": 1, "b": 2, "c": 3}


def test_what_has_no_signature_is_refused():
    for fn in (object(), 5):
        with pytest.raises(SettingsError, match="wrap it in a function"):
            Binder(fn)


# --- automatic keys -----------------------------------------------------------------------------


def test_operations_are_named_by_module_and_qualname():
    assert operation_of(f1) == f"{__name__}.f1"
    assert operation_of(Shop.pay) == f"{__name__}.Shop.pay"
    assert operation_of(Shop().pay) == f"{__name__}.Shop.pay"
    assert operation_of(Shop()) == f"{__name__}.Shop.__call__"
    assert operation_of(functools.partial(f1, 1)) == f"{__name__}.f1"
    assert operation_of(asyncio.sleep) == "asyncio.tasks.sleep"


SHOP = """
import multiprocessing
from semel.keys import operation_of

def charge(): ...

def shown():
    print(operation_of(charge), flush=True)

if __name__ == "__main__":
    shown()
    child = multiprocessing.get_context("spawn").Process(target=shown)
    child.start()
    child.join()
"""


@pytest.mark.parametrize(
    ("how", "times"),
    [(["shop.py"], 2), (["-m", "shop"], 2), (["-c", "import shop; shop.shown()"], 1)],
    ids=["script", "module", "imported"],
)
def test_a_script_has_the_name_that_others_import_it_by(tmp_path, how, times):
    """Else what `python shop.py` did would be another operation to the worker that imports it."""
    (tmp_path / "shop.py").write_text(SHOP)
    source = str(pathlib.Path(inspect.getfile(operation_of)).parents[2])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([source, str(tmp_path)])}
    said = subprocess.check_output([sys.executable, *how], cwd=tmp_path, env=env, text=True)
    assert said.split() == ["shop.charge"] * times


def test_a_local_function_has_a_name_and_a_lambda_has_none():
    def local(): ...

    assert operation_of(local).endswith("<locals>.local")
    with pytest.raises(SettingsError, match="operation="):
        operation_of(lambda: None)


def test_an_automatic_key_is_readable():
    key = auto_key("shop.pay", {"a": 1})
    assert key.startswith("shop.pay:")
    assert len(key) == len("shop.pay:") + 64
    assert make_key(key).text == key


def test_automatic_keys_differ_with_operation_and_arguments():
    made = [
        auto_key(operation, bound)
        for operation in ("shop.pay", "payroll.pay", "shop.Pay")
        for bound in ({}, {"a": 1}, {"a": True}, {"a": 1.0}, {"a": "1"}, {"b": 1}, {"a": (1,)})
    ]
    assert len(set(made)) == len(made)


def test_a_long_name_is_cut_and_stays_unique():
    long, longer = "m." + "ä" * 200, "m." + "ä" * 201
    made = [auto_key(name, {"a": 1}) for name in (long, longer)]
    assert len(set(made)) == 2
    for key in made:
        assert len(key.encode()) <= 255
        make_key(key)


def test_the_key_is_fixed_before_the_body_can_change_its_arguments():
    lines = [1]
    key = auto_key("f", {"lines": lines})
    lines.append(2)
    assert key != auto_key("f", {"lines": lines})


def test_the_refusal_names_operation_and_parameter():
    with pytest.raises(SettingsError) as caught:
        auto_key("shop.pay", {"order": 1, "conn": [Silent()]})
    assert str(caught.value).startswith("shop.pay: parameter conn[0]: ")
    assert "key=" in str(caught.value)


def test_plain_and_odd_arguments_make_one_kind_of_key():
    class Mine(dict):
        pass

    assert auto_key("f", {"b": 1, "a": ()}) == auto_key("f", {"a": (), "b": 1})
    with pytest.raises(SettingsError, match="plain dict"):
        auto_key("f", {"a": Mine()})


# --- templates ----------------------------------------------------------------------------------


@dataclass
class Customer:
    id: Any
    names: Any = ()


NAMES = ("user_id", "amount", "order", "kwargs")


def render(text: str, **bound: Any) -> str:
    return Template(text, NAMES).render(bound)


def test_a_template_reads_like_its_key():
    assert render("invoice:{user_id}:{amount}", user_id="u7", amount=5) == "invoice:u7:5"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a b", "a b"),
        (0, "0"),
        (-1, "-1"),
        (True, "True"),
        (1.5, "1.5"),
        (Decimal("1.50"), "1.50"),
        (uuid.UUID(int=1), str(uuid.UUID(int=1))),
        (Colour.RED, "RED"),
        (Level.LOW, "LOW"),
        (date(2024, 1, 2), "2024-01-02"),
        (datetime(2024, 1, 2, tzinfo=UTC), "2024-01-02T00:00:00+00:00"),
        (time(1, 2), "01:02:00"),
        ("100%", "100%25"),
        ("ü", "ü"),
    ],
)
def test_values_are_written_plainly(value, shown):
    assert render("{user_id}", user_id=value) == shown


def test_attributes_and_items_are_followed():
    order = Customer(id={"de": [{"n": "x"}]}, names=["a", "b"])
    assert render("{order.id[de][0][n]}/{order.names[1]}", order=order) == "x/b"
    assert render("{kwargs[order-id]}", kwargs={"order-id": 3}) == "3"


def test_braces_and_constants():
    assert render("{{{user_id}}}", user_id=1) == "{1}"
    assert render("nightly") == "nightly"
    assert render("{user_id}kg", user_id=1) == "1kg"


def test_separators_inside_values_are_escaped():
    one = render("{user_id}:{amount}", user_id="a:b", amount="c")
    other = render("{user_id}:{amount}", user_id="a", amount="b:c")
    assert (one, other) == ("a%3Ab:c", "a:b%3Ac")
    assert render("{user_id}→{amount}", user_id="→", amount=1) == "%E2%86%92→1"


text = st.text("ab:-%3A→2", min_size=1, max_size=4)


@settings(relaxed, max_examples=300)
@given(
    st.sampled_from(["{user_id}:{amount}", "x{user_id}:a{amount}", "{user_id}→b-{amount}:"]),
    st.tuples(text, text),
    st.tuples(text, text),
)
def test_two_calls_never_share_a_rendered_key(template, one, other):
    made = [render(template, user_id=user, amount=amount) for user, amount in (one, other)]
    assert (made[0] == made[1]) == (one == other)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{nobody}", "there are: user_id, amount, order, kwargs"),
        ("{}", "name a parameter"),
        ("{0}", "name a parameter"),
        ("{user_id!r}", "name it only"),
        ("{amount:.2f}", "name it only"),
        ("{user_id", "cannot be read"),
        ("user_id}", "cannot be read"),
        ("{order.__class__}", "name a parameter"),
        ("{order._private}", "name a parameter"),
        ("{order.pay()}", "name a parameter"),
        ("{order.}", "name a parameter"),
        ("{order[]}", "name a parameter"),
        ("{user_id + 1}", "name a parameter"),
        ("{user_id}{amount}", "between two fields"),
        ("{user_id}and{amount}", "between two fields"),
        ("{user_id}%{amount}", "between two fields"),
    ],
)
def test_a_template_that_cannot_work_is_refused_when_it_is_written(template, says):
    with pytest.raises(SettingsError, match=says):
        Template(template, NAMES)


@pytest.mark.parametrize("value", ["", None])
def test_empty_values_are_refused(value):
    with pytest.raises(SettingsError, match=r"\{user_id\} is .* must name something"):
        render("u:{user_id}", user_id=value)


@pytest.mark.parametrize("value", [[1], {}, b"x", object(), Customer(1), (1,), Silent])
def test_values_without_one_spelling_are_refused(value):
    with pytest.raises(SettingsError, match=r"\{user_id\}.*key="):
        render("u:{user_id}", user_id=value)


@pytest.mark.parametrize("template", ["{order.id.x}", "{order[a]}", "{order.names[5]}"])
def test_what_a_call_does_not_have_is_named(template):
    with pytest.raises(SettingsError, match="cannot be read from this call"):
        render(template, order=Customer(id=1))


# --- in one go ----------------------------------------------------------------------------------


def at_length(fn, key, args, kwargs, *, compares=False, **settings):
    """What `identifier` promises to answer, one step after another."""
    binder = Binder(fn)
    bound = binder.bind(args, kwargs)
    make = functools.partial(make_key, operation="shop.pay", **settings)
    made = key.key(bound, make) if isinstance(key, AutoKey) else make(key.render(bound))
    if isinstance(key, AutoKey):
        assert made.id == make(key.render(bound)).id
    if not compares:
        return made, b""
    compared = {name: value for name, value in bound.items() if name != binder.self_name}
    return made, fingerprint(canonical_call("shop.pay", compared))


def in_one_go(fn, key, args, kwargs, **settings):
    return identifier(Binder(fn), key, operation="shop.pay", **settings)(args, kwargs)


def answers(call):
    try:
        return call()
    except (ValueError, TypeError) as error:
        return type(error), str(error)


SETTINGS = [
    {},
    {"tenant": "acmé"},
    {"version": "2"},
    {"per_operation": True},
    {"tenant": "t", "version": "ü", "per_operation": True},
]

# Beside one of these, the walk writes a large integer in another way than `json` does.
tagged = st.sampled_from([uuid.UUID(int=1), b"x", date(2024, 1, 1), datetime(2024, 1, 1, fold=1)])
large = st.sampled_from([2**2100 - 1, 2**2100, -(2**2100), [10**700], 10**5000, "7" * 700])
any_argument = arguments | tagged | large | st.text() | st.floats() | st.integers()


@settings(relaxed, max_examples=400)
@given(any_argument, any_argument, st.sampled_from(SETTINGS))
def test_in_one_go_is_what_it_is_at_length(one, other, more):
    key = AutoKey("shop.pay")
    args, kwargs = (one,), {"b": other}
    assert in_one_go(f1, key, args, kwargs, **more) == at_length(f1, key, args, kwargs, **more)


@settings(relaxed, max_examples=400)
@given(any_argument, any_argument, st.booleans(), st.sampled_from(SETTINGS))
def test_in_one_go_by_template_is_what_it_is_at_length(one, other, compares, more):
    key = Template("it's {{{a}}}-{b}:%\\n", Binder(f1).names)
    call = (f1, key, (one, other), {})
    more = {**more, "compares": compares}
    assert answers(lambda: in_one_go(*call, **more)) == answers(lambda: at_length(*call, **more))


def hiding(type, kind, write, show, *, write_____="w", __builtins__=0): ...  # noqa: A002


class Till:
    def pay(self, user_id, amount=5): ...


@pytest.mark.parametrize(
    ("fn", "template", "args", "kwargs"),
    [
        (f0, None, (), {}),
        (f1, None, (1,), {}),
        (f2, None, (1,), {"c": "x"}),
        (f3, None, (1,), {"z": 1, "y": [2]}),
        (f3, None, (1, 2, 3), {}),
        (f4, None, (), {"a": 1}),
        (f1, None, (1, 2, 3, 4), {}),
        (f1, None, (), {"zzz": 1}),
        (hiding, None, (1, "2", None, 2.5), {}),
        (hiding, "{type}:{show}", (1, "2", None, 2.5), {}),
        (functools.partial(f1, 7), None, (1,), {}),
        (functools.partial(f1, 7), "{a}:{b}", (1,), {}),
        (Till.pay, "{user_id}", (object(), "u"), {}),
        (Till.pay, "{user_id}", (object(), ""), {}),
        (Till().pay, "{user_id}", ("u",), {}),
        (f1, "{a[id]}", ({"id": 3}, 2), {}),
        (f1, "{a[id]}", ({"id": None}, 2), {}),
        (f1, "{a[id]}", ({}, 2), {}),
        (f1, "{a.id}/{b}", (Order(3), 2), {}),
        (f1, "{a}", (Colour.RED, 2), {}),
        (f1, "{a}", (None, 2), {}),
        (f1, "{a}", ("x" * 254, 2), {}),
        (f1, "{a}", ("x" * 256, 2), {}),
        (f1, "{a}", ("ü\n", 2), {}),
        (f1, "{a}", ("\ud800", 2), {}),
        (f1, "daily", (1, 2), {}),
        (f1, "daily", (1, object()), {}),
    ],
)
def test_in_one_go_for_every_kind_of_call(fn, template, args, kwargs):
    key = Template(template, Binder(fn).names) if template else AutoKey("shop.pay")
    for compares in {False, template is not None}:
        assert answers(lambda: in_one_go(fn, key, args, kwargs, compares=compares)) == answers(  # noqa: B023
            lambda: at_length(fn, key, args, kwargs, compares=compares)  # noqa: B023
        )


@pytest.mark.parametrize("operation", ["größe", "tab\t", "o" * 300])
def test_in_one_go_under_odd_names(operation):
    key = AutoKey(operation)
    made, _ = identifier(Binder(f1), key, operation=operation)((1, 2), {})
    assert made.id == make_key(key.render({"a": 1, "b": 2, "c": 3}), operation=operation).id
    assert len(made.text.encode()) <= 255
    assert made.text.isprintable()


def test_a_refusal_has_no_other_error_behind_it():
    with pytest.raises(SettingsError) as caught:
        in_one_go(f1, AutoKey("shop.pay"), (object(), 1), {})
    assert caught.value.__context__ is None


# --- children and attempts ----------------------------------------------------------------------


def test_a_child_key_is_a_uuid_that_stays():
    id = make_key("k").id
    assert child_key(id, "charge") == child_key(id, "charge")
    made = uuid.UUID(child_key(id, "charge"))
    assert (made.version, made.variant) == (8, uuid.RFC_4122)
    others = {
        child_key(id, "refund"),
        child_key(make_key("l").id, "charge"),
        child_key(id, "\ud800"),
    }
    assert len(others | {str(made)}) == 4


PINNED = {
    "identity": "cb8c714455baab6c7cbe691fe8936118bacb383d1c87d96ed6e59f70ba061172",
    "child": "6113c3d2-51dd-898c-aadf-576387d836fa",
    "auto": "shop.pay:5e29afe0e8b06c8a06bdd8950b2d9058207f055210217abb9587d7f77d81af22",
}


def test_keys_stay_what_they_were():
    """What is hashed is a format: these are stored in the field."""
    key = make_key("invoice:7", tenant="acme")
    assert key.id.hex() == PINNED["identity"]
    assert child_key(key.id, "charge") == PINNED["child"]
    assert auto_key("shop.pay", {"a": 1, "b": (Decimal("1.0"), {2: None})}) == PINNED["auto"]


def test_an_attempt_names_its_holder():
    holder, _, random = new_attempt().rpartition("/")
    host, _, pid = holder.rpartition(":")
    assert int(pid) == os.getpid()
    assert len(host) <= 40
    assert len(bytes.fromhex(random)) == 8
    assert len({new_attempt() for _ in range(1000)}) == 1000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_a_name_of_its_own():
    new_attempt()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, f"{os.getpid()} {new_attempt()}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    pid, attempt = os.read(reading, 1000).decode().split()
    os.close(reading)
    os.close(writing)
    assert f":{pid}/" in attempt
    assert f":{os.getpid()}/" in new_attempt()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_copy_of_the_process_makes_other_attempts(monkeypatch):
    """A cloned machine: every byte the same, the process's number too, and nobody is told."""
    import ctypes

    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid)
    new_attempt()
    reading, writing = os.pipe()
    if not ctypes.PyDLL(None).fork():
        os.write(writing, new_attempt().encode())
        os._exit(0)
    theirs = os.read(reading, 1000).decode()
    os.wait()
    os.close(reading)
    os.close(writing)
    assert theirs.rpartition("/")[0] == new_attempt().rpartition("/")[0]
    assert theirs != new_attempt()
