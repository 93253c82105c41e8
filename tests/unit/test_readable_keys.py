"""The text of a default key names the function and its arguments; the digest is the identity."""

from __future__ import annotations

import dataclasses
import pickle
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel import DuplicateExecutionError, InProgressError, SettingsError, idempotent, once
from semel.admin import Admin
from semel.colour import SYNC, run
from semel.guard import Retry
from semel.keys import new_attempt
from semel.stores.memory import MemoryStore
from semel.stores.sqlite import SQLiteStore
from semel.values import Terms


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    made = MemoryStore() if request.param == "memory" else SQLiteStore(tmp_path / "semel.db")
    yield made
    made.close()


def invoices(store, **settings):
    @idempotent(store=store, **settings)
    def create_invoice(user_id, amount):
        return amount

    return create_invoice


def text_of(*args, **settings):
    return invoices(MemoryStore(), **settings).key_for(*args).text


@dataclasses.dataclass
class Order:
    id: int


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        ((123, 100), "user_id=123:amount=100"),
        (("ann", None), "user_id=ann:amount=None"),
        (("123", "None"), "user_id='123':amount='None'"),
        (("a b", Decimal("40.00")), "user_id='a b':amount=40.00"),
    ],
)
def test_text_of_default_key_shows_the_arguments(args, shown):
    assert text_of(*args).startswith(f"create_invoice:{shown}")


def test_text_of_default_key_of_plain_arguments_is_the_call_and_nothing_else():
    assert text_of(123, 100) == "create_invoice:user_id=123:amount=100"


def test_text_with_a_cut_or_nested_argument_ends_with_digits_of_the_digest():
    one, other = text_of("x" * 60, [1]), text_of("x" * 61, [1])
    assert one.startswith(f"create_invoice:user_id={'x' * 37}...:amount=[1]#")
    assert one != other
    assert len(one.rpartition("#")[2]) == 12
    assert "amount=Order(id=7)#" in text_of(1, Order(7))


def test_operation_given_by_name_stands_first_in_the_text():
    assert text_of(1, 2, operation="billing") == "billing:user_id=1:amount=2"


def test_text_of_call_without_arguments_has_parentheses():
    @idempotent(store=MemoryStore())
    def nightly():
        return 1

    assert nightly.key_for().text == "nightly()"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(anything, anything)
def test_text_prints_and_is_at_most_255_bytes_for_all_arguments(one, other):
    text = text_of(one, other)
    assert text.isprintable()
    assert len(text.encode()) <= 255


@given(anything, anything)
def test_two_calls_have_two_texts(one, other):
    first, second = (invoices(MemoryStore()).key_for(each, 1) for each in (one, other))
    assert (first.text == second.text) == (first.id == second.id)


def test_key_can_be_compared_shown_and_pickled_before_its_text_is_read():
    create = invoices(MemoryStore())
    assert pickle.loads(pickle.dumps(create.key_for(1, 2))) == create.key_for(1, 2)
    assert "create_invoice:user_id=1:amount=2" in repr(create.key_for(1, 2))
    assert not hasattr(create.key_for(1, 2), "nonsense")


def test_error_of_a_duplicate_shows_the_text(store):
    create = invoices(store, on_duplicate="raise")
    create(123, 100)
    with pytest.raises(DuplicateExecutionError, match="create_invoice:user_id=123:amount=100"):
        create(123, 100)


def test_record_has_the_text_and_admin_explains_the_record_by_it(store):
    create = invoices(store)
    create(123, 100)
    create(123, 101)
    desk = Admin(store)
    assert {one.key.text for one in desk.records()} == {
        "create_invoice:user_id=123:amount=100",
        "create_invoice:user_id=123:amount=101",
    }
    story = desk.explain("create_invoice:user_id=123:amount=100")
    assert story.record.key.id == create.key_for(123, 100).id
    assert desk.explain("create_invoice:user_id=123:amount=102") is None


def test_admin_changes_no_record_by_the_text_of_a_default_key_and_names_its_id(store):
    create = invoices(store)
    create(123, 100)
    desk, id = Admin(store), create.key_for(123, 100).id.hex()
    for answer in (
        desk.forget("create_invoice:user_id=123:amount=100"),
        desk.resolve("create_invoice:user_id=123:amount=100", Retry()),
    ):
        assert not answer
        assert answer.why.endswith(f"give an id: {id}")
    assert desk.forget(id)
    assert not desk.records()


@pytest.mark.parametrize(
    "options", [{"version": "3"}, {"http": True}, {"operation": "refund", "per_operation": True}]
)
def test_admin_finds_no_record_of_another_identity_by_its_text(store, options):
    with once("charge:order=7", store=store, version="2") as attempt:
        attempt.done(1)
    desk = Admin(store)
    assert desk.explain("charge:order=7", **options) is None
    assert desk.forget("charge:order=7", **options).missing
    assert not desk.forget("charge:order=7")
    assert len(desk.records()) == 1


def test_admin_refuses_a_text_of_two_records_and_names_their_ids(store):
    for version in "12":
        invoices(store, version=version)(123, 100)
    with pytest.raises(SettingsError, match=r"the text of 2 records; give an id: [0-9a-f]{64}, "):
        Admin(store).explain("create_invoice:user_id=123:amount=100")


def test_key_of_the_user_that_reads_like_a_default_key_is_found_first(store):
    invoices(store)(123, 100)
    with once("create_invoice:user_id=123:amount=100", store=store) as attempt:
        attempt.done("by hand")
    found = Admin(store).explain("create_invoice:user_id=123:amount=100")
    assert found.outcome.value == "by hand"


def test_error_of_a_running_call_shows_the_text(store):
    create = invoices(store)
    claim = store.ledger(SYNC).claim(
        create.key_for(123, 100), attempt=new_attempt(), terms=Terms(lease_s=60)
    )
    run(claim)
    with pytest.raises(InProgressError, match="create_invoice:user_id=123:amount=100"):
        create(123, 100)


def test_fingerprint_that_cannot_be_compared_is_refused_with_advice_that_applies(store):
    with (
        pytest.raises(SettingsError, match="fingerprint= a value") as caught,
        once("k", fingerprint=object(), store=store),
    ):
        pass
    assert "key=" not in str(caught.value)
