"""What goes over the wire, and what is kept of it."""

from __future__ import annotations

import json
import re
from urllib.parse import quote_from_bytes, unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import (
    ClaimLostError,
    CorruptRecordError,
    IdempotencyConflictError,
    InProgressError,
    OutcomeUnknownError,
    ReplayedError,
    ResultLostError,
    SettingsError,
    StoreUnavailableError,
)
from semel.http import protocol
from semel.http.protocol import Refusal, Request, Response, exact_path

PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=255)


def request(path="/orders", query=b"", method="POST", headers=()):
    return Request(method, path, query, list(headers), {})


def refused(*contents):
    with pytest.raises(Refusal) as caught:
        protocol.parse_key(contents)
    said = json.loads(caught.value.response.body)
    assert caught.value.response.status == 400
    assert said["type"] == "urn:semel:problem:key-malformed"
    return said["detail"]


# --- the key


@given(PRINTABLE)
def test_every_string_of_the_draft_is_a_key(key):
    sent = key.replace("\\", "\\\\").replace('"', '\\"').encode()
    assert protocol.parse_key([b'"' + sent + b'"']) == key


@pytest.mark.parametrize(
    "sent",
    [b"8e03978e-40d5", b'"8e03978e-40d5"', b'  "8e03978e-40d5"\t', b" 8e03978e-40d5 "],
)
def test_quoted_and_bare_are_the_same_key(sent):
    assert protocol.parse_key([sent]) == "8e03978e-40d5"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b" ",
        b"two words",
        b"a, b",
        b"a,b",
        b'"a", "b"',
        b'"a";p=1',
        b"a;p=1",
        b'"open',
        b'"',
        b'a"b',
        b'"a"b"',
        b'"\\n"',
        b"\\",
        "clé".encode(),
        "clé".encode("latin-1"),
        b"a\x00b",
        b"a\r\nb",
        b'"a\r\nSet-Cookie: x"',
        b'"tab\t"',
        b":YWJj:",  # bare it is fine
    ],
)
def test_what_is_no_single_string_is_refused(sent):
    if sent == b":YWJj:":
        assert protocol.parse_key([sent]) == ":YWJj:"
    else:
        refused(sent)


def test_a_header_that_comes_twice_is_refused():
    assert "more than once" in refused(b"a", b"a")


@pytest.mark.parametrize("sent", [b'""', b"x" * 256, b'"' + b"x" * 256 + b'"'])
def test_empty_and_too_long_keys_are_refused(sent):
    assert "1 to 255" in refused(sent)


def test_the_longest_key_is_counted_without_its_escapes():
    assert protocol.parse_key([b'"' + b'\\"' * 255 + b'"']) == '"' * 255


@given(st.binary(max_size=300))
def test_no_header_makes_it_stumble(sent):
    try:
        key = protocol.parse_key([sent])
    except Refusal as refusal:
        status = refusal.response.status
    else:
        status = 200
        assert 1 <= len(key) <= 255
        assert key.isascii()
        assert key.isprintable()
    assert status in {200, 400}


# --- the fingerprint


def test_method_path_query_and_body_are_compared():
    prints = {
        protocol.compared("bytes", request(), b"{}"),
        protocol.compared("bytes", request(method="PATCH"), b"{}"),
        protocol.compared("bytes", request("/order"), b"s{}"),
        protocol.compared("bytes", request("/orders/"), b"{}"),
        protocol.compared("bytes", request(query=b"a=1"), b"{}"),
        protocol.compared("bytes", request(), b"{} "),
        protocol.compared("bytes", request(), b""),
    }
    assert len(prints) == 7


@given(st.text(max_size=8), st.binary(max_size=8), st.binary(max_size=8), st.integers(0, 8))
def test_no_byte_moves_from_one_part_to_the_next(path, query, body, cut):
    whole = query + body
    moved = protocol.compared("bytes", request(path, whole[:cut]), whole[cut:])
    same = whole[:cut] == query
    assert (moved == protocol.compared("bytes", request(path, query), body)) == same


def test_headers_are_not_compared():
    traced = request(headers=[(b"traceparent", b"00-1"), (b"authorization", b"Bearer 2")])
    assert protocol.compared("bytes", traced, b"") == protocol.compared("bytes", request(), b"")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (b'{"a": 1, "b": 2}', b'{"b":2,"a":1}', True),
        (b"[1, 2]", b"[2, 1]", False),
        (b'{"a": 1}', b'{"a": "1"}', False),
        (b'{"a": 1}', b'{"a": true}', False),
        (b'{"a": 0.1}', b'{"a": 0.1000000000000000055}', False),
        (b'{"a": 1e400}', b'{"a": 1e401}', False),
        (b'"\\u00e9"', '"é"'.encode(), True),
        (b"", b"null", False),
    ],
)
def test_json_is_compared_by_what_it_says(one, other, same):
    prints = [protocol.compared("json", request(), body) for body in (one, other)]
    assert (prints[0] == prints[1]) is same


@pytest.mark.parametrize("body", [b'{"a":5,"a":6}', b"{", b"NaN", b"\xff", b"[" * 100_000])
def test_json_that_cannot_be_compared_is_refused(body):
    with pytest.raises(Refusal) as caught:
        protocol.compared("json", request(), body)
    assert caught.value.response.status == 400


def test_a_function_chooses_what_is_compared():
    def amount(request, body):
        return {"path": request.path, "amount": json.loads(body)["amount"]}

    prints = [
        protocol.compared(amount, request(), body)
        for body in (b'{"amount": 1, "at": 1}', b'{"amount": 1, "at": 2}', b'{"amount": 2}')
    ]
    assert prints[0] == prints[1] != prints[2]


def test_nothing_may_be_compared():
    assert protocol.compared(None, request(), b"a") == b""


# --- what is kept


HEADERS = st.lists(
    st.tuples(
        st.sampled_from([b"Link", b"location", b"ETag", b"x-a", b"content-type"]),
        st.binary(max_size=20).filter(lambda b: b"\r" not in b and b"\n" not in b),
    )
)


@given(st.integers(100, 599), HEADERS, st.binary(max_size=200))
def test_a_response_comes_back_to_the_byte(status, headers, body):
    response = Response(status, tuple(headers), body)
    assert protocol.read(protocol.written(response)) == response


def test_what_belongs_to_one_person_or_connection_is_not_kept():
    kept = ((b"location", b"/1"), (b"content-length", b"2"), (b"link", b"a"), (b"link", b"b"))
    dropped = [
        (b"Set-Cookie", b"session=1"),
        (b"date", b"today"),
        (b"connection", b"close, X-Mine"),
        (b"x-mine", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"x-rate", b"9"),
    ]
    response = Response(201, (*kept[:2], *dropped, *kept[2:]), b"{}")
    assert protocol.read(protocol.written(response, {b"x-rate"})).headers == kept


@pytest.mark.parametrize("header", [(b"x-a", b"1\r\nset-cookie: b"), (b"x\ny", b"1")])
def test_a_header_that_would_be_two_is_not_kept(header):
    response = Response(200, (header, (b"x-b", b"2")), b"")
    assert protocol.read(protocol.written(response)).headers == ((b"x-b", b"2"),)


def test_a_wrong_length_is_not_kept():
    response = Response(200, ((b"content-length", b"5"),), b"ok")
    assert protocol.read(protocol.written(response)).headers == ()


@pytest.mark.parametrize("data", [b"", b"{}", b"abc\r\n\r\n", b"200\r\nno header\r\n\r\n"])
def test_what_is_no_recorded_response_is_not_taken_for_one(data):
    with pytest.raises(ValueError, match="it "):
        protocol.read(data)


def test_a_replay_says_that_it_is_one_and_shows_it_to_scripts():
    response = Response(201, ((b"x", b"1"),), b"body")
    plain = protocol.replayed(response, request())
    shown = protocol.replayed(response, request(headers=[(b"origin", b"https://shop")]))
    assert plain.headers == ((b"x", b"1"), (b"idempotent-replayed", b"true"))
    assert shown.headers[2] == (
        b"access-control-expose-headers",
        b"Idempotent-Replayed, Retry-After",
    )
    assert plain.body == shown.body == b"body"


# --- what is said instead


@pytest.mark.parametrize(
    ("error", "status", "name", "retry_after"),
    [
        (InProgressError("", retry_after=20.0), 409, "in-progress", b"3"),
        (InProgressError("", retry_after=0.2), 409, "in-progress", b"1"),
        (ClaimLostError(""), 409, "in-progress", b"3"),
        (IdempotencyConflictError(""), 422, "key-reused", None),
        (OutcomeUnknownError(""), 409, "outcome-unknown", None),
        (ResultLostError(""), 410, "response-not-kept", None),
        (StoreUnavailableError(""), 503, "store-unavailable", b"1"),
        (CorruptRecordError(""), 503, "store-unavailable", b"1"),
        (ReplayedError("the bank said no"), 500, "interrupted", None),
    ],
)
def test_every_refusal_has_its_status_and_its_name(error, status, name, retry_after):
    answer = protocol.refusal(error, pace_s=2.1)
    said = json.loads(answer.body)
    headers = dict(answer.headers)
    assert (answer.status, said["status"], said["type"]) == (
        status,
        status,
        f"urn:semel:problem:{name}",
    )
    assert headers[b"content-type"] == b"application/problem+json"
    assert headers[b"content-length"] == b"%d" % len(answer.body)
    assert headers.get(b"retry-after") == retry_after


def test_a_mistake_in_the_settings_is_not_dressed_up():
    with pytest.raises(SettingsError):
        protocol.refusal(SettingsError("scope= gave 7"))


def test_a_refusal_tells_nothing_of_the_store():
    answer = protocol.refusal(StoreUnavailableError("postgresql://app:secret@db refused"))
    assert b"secret" not in answer.body
    assert b"db" not in answer.body


# --- paths --------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=6), min_size=1, max_size=4))
def test_exact_path_tells_all_segments_apart(segments):
    raw = b"/" + b"/".join(quote_from_bytes(segment, safe="").encode() for segment in segments)
    path = unquote_to_bytes(raw).decode("utf-8", "replace")
    exact = exact_path(raw, path, errors="replace") or path
    assert [unquote_to_bytes(part) for part in exact.encode()[1:].split(b"/")] == segments


@given(st.lists(st.binary(max_size=6), min_size=1, max_size=4))
def test_exact_path_is_one_for_both_cases_of_escapes(segments):
    raw = b"/" + b"/".join(quote_from_bytes(segment, safe="").encode() for segment in segments)
    lower = re.sub(rb"%..", lambda found: found[0].lower(), raw)
    path = unquote_to_bytes(raw).decode("utf-8", "replace")
    assert exact_path(raw, path, errors="replace") == exact_path(lower, path, errors="replace")
