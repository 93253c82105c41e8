"""Messages as CloudEvents: valid to those who wrote the specification, and back to the byte."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from cloudevents.core.bindings import http as sdk_http
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.cloudevents import (
    JSON,
    STRUCTURED,
    NotAnEventError,
    from_binary,
    from_json,
    is_clean,
    to_binary,
    to_json,
)
from semel.errors import SettingsError
from semel.messages import Message
from semel.outbox import Event, Outbox

MOST = 2**63 - 1
TIME = datetime(2026, 3, 1, 12, 30, 15, 250_000, tzinfo=UTC)
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

PAID = Message(
    position=MOST,
    id="0190f7a2-1111-7222-8333-444455556666",
    type="order.paid",
    topic="orders",
    tenant="acme",
    aggregate_type="order",
    aggregate_id="4711",
    seq=2**40,
    payload='{ "total" : 4e1 }\n',
    time=TIME,
    headers={"traceparent": TRACE, "note": 'a "quoted"\n\x85 line'},
    source="/shop",
)
BARE = Message(1, "1", "t", "orders", "", "order", "1", None, "null", TIME)
STAND_IN = replace(PAID, payload="null", refused="it has 2000000 bytes, and NATS takes 1048576")

# --- messages as they can come from an outbox ---------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn"]), min_size=1, max_size=20)
plain = st.none() | st.booleans() | st.integers() | texts
values = st.recursive(
    plain | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=6,
)
spaces = st.text(" \t\r\n", max_size=3)
written = st.one_of(
    values.map(json.dumps),
    values.map(lambda given: json.dumps(given, ensure_ascii=False, indent=3)),
    st.sampled_from(
        [
            "1" * 5000,
            "1e400",
            "-0.10000000000000000000000000001",
            r'"\ud800"',
            '{"data":1,"data":2}',
            '{"a":"x","data":1}',
            r'{"text":"},\"data\":{"}',
            '"},"',
        ]
    ),
)


@st.composite
def payloads(draw: st.DrawFn) -> str:
    return f"{draw(spaces)}{draw(written)}{draw(spaces)}"


messages = st.builds(
    Message,
    position=st.integers(1, MOST),
    id=names,
    type=names,
    topic=names,
    tenant=st.just("") | names,
    aggregate_type=names,
    aggregate_id=names,
    seq=st.none() | st.integers(1, MOST),
    payload=payloads(),
    time=st.datetimes(
        min_value=datetime(2, 1, 1),  # noqa: DTZ001 - the time zone comes beside it
        max_value=datetime(9998, 1, 1),  # noqa: DTZ001
        timezones=st.sampled_from([UTC, timezone(timedelta(hours=14)), timezone.min]),
    ),
    headers=st.dictionaries(
        st.sampled_from(["traceparent", "tracestate"]) | texts, texts, max_size=4
    ),
    source=st.just("") | names,
    refused=st.just("") | names,
)


def came_back(message: Message) -> Message:
    """What must arrive: everything, with the source that stands for none."""
    return Message(
        **{name: getattr(message, name) for name in Message.__slots__ if name != "source"},
        source=message.source or "/semel/outbox",
    )


# --- there and back -----------------------------------------------------------------------------


@settings(max_examples=200)
@given(messages)
def test_a_document_says_everything_to_the_byte(message: Message) -> None:
    document = to_json(message)
    assert from_json(document) == came_back(message)
    assert from_json(document.encode()) == came_back(message)


@settings(max_examples=150)
@given(messages)
def test_attributes_and_body_say_everything_to_the_byte(message: Message) -> None:
    attributes, body = to_binary(message)
    assert from_binary(attributes, body) == came_back(message)
    assert all(is_clean(text) for text in attributes.values())


@settings(max_examples=100)
@given(messages)
def test_a_document_is_the_same_after_another_journey(message: Message) -> None:
    assert to_json(from_json(to_json(message))) == to_json(message)


# --- as others see it ---------------------------------------------------------------------------


def of_sdk(message: Message) -> Any:
    return JSONFormat().read(CloudEvent, to_json(message).encode())


@settings(max_examples=100)
@given(messages.filter(lambda m: len(m.payload) < 4300))  # the SDK reads numbers
def test_the_sdk_takes_a_document_for_a_valid_event(message: Message) -> None:
    event = of_sdk(message)
    assert event.get_id() == message.id
    assert event.get_type() == message.type
    assert event.get_source() == (message.source or "/semel/outbox")
    assert event.get_subject() == f"{message.aggregate_type}/{message.aggregate_id}"
    assert event.get_time() == message.time
    assert event.get_data() == message.data


def test_the_sdk_takes_a_request_in_binary_mode_for_a_valid_event() -> None:
    attributes, body = to_binary(PAID)
    kind = attributes.pop("datacontenttype")
    headers = {f"ce-{name}": sdk_http._encode_header_value(t) for name, t in attributes.items()}
    request = sdk_http.HTTPMessage(headers={"content-type": kind, **headers}, body=body)
    event = sdk_http.from_binary(request, JSONFormat(), CloudEvent)
    assert event.get_data() == {"total": 40.0}
    assert event.get_extension("position") == str(MOST)
    assert event.get_extension("traceparent") == TRACE


def test_what_the_sdk_sends_in_binary_mode_is_read() -> None:
    made = CloudEvent({"type": "t", "source": "/s", "subject": "order/1"}, {"a": 1})
    sent = sdk_http.to_binary(made, JSONFormat())
    attributes = {
        name.removeprefix("ce-"): sdk_http.unquote(text) for name, text in sent.headers.items()
    }
    read = from_binary(attributes, sent.body)
    assert (read.id, read.data, read.time) == (made.get_id(), {"a": 1}, made.get_time())
    assert (read.aggregate_type, read.aggregate_id) == ("order", "1")


def test_what_the_sdk_writes_is_read() -> None:
    made = CloudEvent({"type": "t", "source": "/s", "subject": "whole", "tracestate": "a=1"}, {})
    read = from_json(JSONFormat().write(made))
    assert (read.id, read.type, read.source, read.data) == (made.get_id(), "t", "/s", {})
    assert (read.aggregate_type, read.aggregate_id) == ("", "whole")
    assert (read.position, read.seq, read.topic, read.tenant) == (0, None, "", "")
    assert read.headers == {"tracestate": "a=1"}


@pytest.mark.parametrize("message", [PAID, BARE, STAND_IN], ids=["paid", "bare", "stand-in"])
def test_attributes_are_of_the_types_that_the_specification_has(message: Message) -> None:
    document = json.loads(to_json(message))
    data = document.pop("data")
    assert data == message.data
    for name, text in document.items():
        assert re.fullmatch("[a-z0-9]{1,20}", name)
        assert isinstance(text, str)  # an Integer has 32 bits; ours may need more
        assert text
        assert is_clean(text)
    assert document == to_binary(message)[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", document["time"])


def test_a_stand_in_says_why_it_was_refused_and_has_no_data() -> None:
    document = json.loads(to_json(STAND_IN))
    assert (document["semelrefused"], document["data"]) == (STAND_IN.refused, None)
    attributes, body = to_binary(STAND_IN)
    assert (attributes["semelrefused"], body) == (STAND_IN.refused, b"null")
    assert from_json(to_json(STAND_IN)) == from_binary(attributes, b"") == STAND_IN
    assert "semelrefused" not in to_json(PAID)
    assert "semelrefused" not in to_binary(PAID)[0]
    event = of_sdk(STAND_IN)
    assert (event.get_extension("semelrefused"), event.get_data()) == (STAND_IN.refused, None)


def test_media_types_are_those_of_the_specification() -> None:
    assert JSON == to_binary(PAID)[0]["datacontenttype"] == "application/json"
    assert STRUCTURED.partition(";")[0] == JSONFormat.CONTENT_TYPE


def test_a_trace_that_no_attribute_can_hold_stays_in_the_headers() -> None:
    message = Message(1, "1", "t", "o", "", "a", "1", 1, "1", TIME, {"traceparent": "a\nb"})
    assert "traceparent" not in json.loads(to_json(message))
    assert from_json(to_json(message)).headers == {"traceparent": "a\nb"}


@pytest.mark.parametrize("odd", ["\x00", "\n", "\x7f", "\x85", "\ud800", "\ufdd0", "\U0010ffff"])
def test_an_outbox_refuses_names_that_no_attribute_can_hold(odd: str) -> None:
    assert not is_clean(f"a{odd}b")
    with pytest.raises(SettingsError):
        Outbox()._entry(Event("t", "order", f"a{odd}b", {}, topic="orders"))


# --- from others --------------------------------------------------------------------------------

FOREIGN = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t"}


def test_data_may_come_before_other_members() -> None:
    text = '{"specversion":"1.0","data": {"n": 1.10} ,"id":"1","source":"/s","type":"t"}'
    assert from_json(text).payload == '{"n": 1.10}'


def test_data_may_come_first_with_spaces_everywhere() -> None:
    text = (
        ' {\n "data" : [ 1e400 , "," ] , "specversion" : "1.0", "id":"1","source":"/s","type":"t"}'
    )
    assert from_json(text).payload == '[ 1e400 , "," ]'


def test_a_document_may_end_with_a_line() -> None:
    assert from_json(to_json(PAID) + "\n") == from_json(to_json(PAID)[:-1] + " }\n")


def test_a_payload_to_the_byte_does_not_depend_on_where_it_stands() -> None:
    members = to_json(PAID)[1:-1].split(',"data":')
    turned = f'{{"data":{members[1]},{members[0]}}}'
    assert from_json(turned).payload == PAID.payload.strip()


def test_of_two_payloads_the_last_counts() -> None:
    text = json.dumps(FOREIGN)[:-1] + ',"data":1,"data":2}'
    assert from_json(text).payload == "2"


@pytest.mark.parametrize("extension", [{"data": 1}, [{"a": 1, "data": 2}], 1.5, True, None])
def test_extensions_of_others_are_passed_over(extension: Any) -> None:
    spoken = {**FOREIGN, "theirs": extension, "data": {"n": 1}}
    for text in (
        json.dumps(spoken),
        json.dumps(spoken, separators=(",", ":")),
        json.dumps({"data": {"n": 1}, **spoken}, separators=(",", ":")),
    ):
        assert from_json(text).data == {"n": 1}


def test_an_event_without_data_says_null() -> None:
    assert from_json(json.dumps(FOREIGN)).payload == "null"
    assert from_binary(FOREIGN, b"").payload == "null"


@pytest.mark.parametrize(
    "name",
    ["subject", "time", "topic", "tenant", "aggregateid", "position", "seq", "headers", "data",
     "data_base64", "traceparent"],
)  # fmt: skip
def test_null_is_as_good_as_absent(name: str) -> None:
    assert from_json(json.dumps({**FOREIGN, name: None})) == from_json(json.dumps(FOREIGN))


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("2026-03-01T12:30:15.25Z", TIME),
        ("2026-03-01T12:30:15.250000999Z", TIME),
        ("2026-03-01t14:30:15.25+02:00", TIME),
        ("2026-03-01T12:30:15.25", TIME),
    ],
)
def test_times_are_read_as_others_write_them(said: str, meant: datetime) -> None:
    assert from_json(json.dumps({**FOREIGN, "time": said})).time == meant


def test_numbers_may_be_numbers() -> None:
    read = from_json(json.dumps({**FOREIGN, "position": 7, "seq": 3}))
    assert (read.position, read.seq) == (7, 3)


# --- garbage ------------------------------------------------------------------------------------

BAD_MEMBERS: list[dict[str, Any]] = [
    {"specversion": "0.3"}, {"specversion": None}, {"id": ""}, {"id": None}, {"id": [1]},
    {"id": "a\x00b"}, {"id": "\ud800"}, {"type": {"a": 1}}, {"source": ["/s"]}, {"subject": True},
    {"tenant": {}}, {"topic": []}, {"position": -1}, {"position": "1e3"}, {"position": True},
    {"position": 2**63}, {"position": "9" * 5000}, {"seq": "one"}, {"seq": 1.5}, {"seq": "٣"},
    {"time": "yesterday"}, {"time": 5}, {"time": "0001-01-01T00:00:00+14:00"},
    {"time": "2026-02-30T00:00:00Z"}, {"headers": "no JSON"}, {"headers": "[1]"},
    {"headers": '[["a","b"]]'}, {"headers": '{"a":{"b":1}}'}, {"headers": '{"a":null}'},
    {"headers": {"a": "b"}}, {"headers": r'{"a":"\ud800"}'}, {"headers": "[" * 100_000},
    {"data_base64": "AAAA"}, {"data": float("nan")}, {"theirs": float("inf")},
]  # fmt: skip


@pytest.mark.parametrize("members", BAD_MEMBERS, ids=lambda m: str(m)[:40])
def test_an_event_that_cannot_be_one_is_refused(members: dict[str, Any]) -> None:
    for spoken in ({**FOREIGN, **members}, {**FOREIGN, "data": 1, **members}):
        for text in (json.dumps(spoken), json.dumps(spoken, separators=(",", ":"))):
            with pytest.raises(NotAnEventError):
                from_json(text)


@pytest.mark.parametrize(
    "document",
    [b"", b"\xff\xfe", b"nothing", b"[]", b"1", b'"a"', b"null", b"{", b"{}", b'{"data":1}',
     b"[" * 100_000, b'{"a":' * 100_000, b'{,"data":1}', b'{"a":1,"data":}', b'{"a":1,"data":1',
     b'{"a":1,"data":1}}', b"\xef\xbb\xbf{}", "\ud800", '{"a":"\ud800","data":1}'],
    ids=lambda d: repr(d)[:30],
)  # fmt: skip
def test_what_is_no_document_is_refused(document: str | bytes) -> None:
    with pytest.raises(NotAnEventError):
        from_json(document)


@pytest.mark.parametrize("body", [b"\xff", b"{", b"NaN", b"1 2", b"[" * 100_000])
def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(NotAnEventError):
        from_binary(to_binary(PAID)[0], body)


broken = st.one_of(
    st.binary(),
    st.text().map(lambda text: text.encode(errors="surrogatepass")),
    st.builds(
        lambda document, cut, add: document[:cut] + add + document[cut:],
        st.sampled_from([to_json(PAID).encode(), json.dumps(FOREIGN).encode()]),
        st.integers(0, 400),
        st.binary(max_size=3) | st.sampled_from([b'"', b",", b"{", b"}", b'"data":', b"null"]),
    ),
    st.builds(
        lambda document, cut, much: document[:cut] + document[cut + much :],
        st.just(to_json(PAID).encode()),
        st.integers(0, 400),
        st.integers(1, 60),
    ),
    st.dictionaries(
        st.sampled_from(["specversion", "id", "source", "type", "time", "seq", "headers", "data"]),
        st.sampled_from(["1.0"]) | values,
    ).map(lambda spoken: json.dumps({**FOREIGN, **spoken}).encode()),
)


@settings(max_examples=600)
@given(broken)
def test_garbage_is_refused_or_read_and_nothing_else(document: bytes) -> None:
    try:
        read = from_json(document)
    except NotAnEventError:
        return
    json.loads(read.payload, parse_int=str)
    assert from_json(to_json(read)) == read


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from([*to_binary(PAID)[0]]), texts), st.binary())
def test_garbage_in_attributes_is_refused_or_read(spoken: dict[str, str], body: bytes) -> None:
    try:
        read = from_binary({**FOREIGN, **spoken}, body)
    except NotAnEventError:
        return
    assert from_binary(*to_binary(read)) == read
