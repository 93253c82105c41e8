from __future__ import annotations

import json

import pytest

from semel.rooms.asking import Act, Join, Leave, Malformed, Ping, WantsSnapshot, asked


def message(kind, payload=None, **more):
    return json.dumps({"type": kind, "payload": {"tableId": "t"} | (payload or {}), **more})


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (message("JOIN"), Join(None, "t")),
        (
            message("JOIN", {"cursor": "1.a", "token": "x", "spectate": True}, requestId="r"),
            Join("r", "t", "1.a", "x", spectate=True),
        ),
        (message("JOIN", {"cursor": 7, "spectate": None}), Join(None, "t", "7")),
        (message("JOIN", {"cursor": "x" * 100}), Join(None, "t", "x" * 64)),
        (message("LEAVE", requestId="r"), Leave("r", "t")),
        ('{"type":"PING"}', Ping(None)),
        (message("PING", requestId="r"), Ping("r")),
        (
            message("REQUEST_SNAPSHOT", {"currentVersion": 3, "reason": "gap"}),
            WantsSnapshot(None, "t", 3, "gap"),
        ),
        (message("REQUEST_SNAPSHOT"), WantsSnapshot(None, "t", None, "manual")),
        (
            message("ACTION_REQUEST", {"actionType": "a", "x": 1}, requestId="r"),
            Act("r", "t", {"actionType": "a", "x": 1}),
        ),
        (
            message(
                "ACTION_REQUEST",
                {"actionType": "a", "expectedVersion": 0},
                requestId="r",
                clientId="c",
                clientSeq=1,
            ),
            Act("r", "t", {"actionType": "a"}, 0, "c", 1),
        ),
        (message("ACTION_REQUEST", {"actionType": ""}, requestId="r", clientSeq=None),
         Act("r", "t", {"actionType": ""})),
    ],
)  # fmt: skip
def test_what_a_client_asks_is_read(text, read):
    assert asked(text) == read


ACT = {"actionType": "a"}


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "[]", "7", "null", "NaN", "{", "[" * 5000, '{"type":"PING","x":NaN}',
        '{"type":"PING","x":1e999}', '{"type":"PING","x":"\\ud800"}',
        '{"type":"PING","x":' + "9" * 5000 + "}",
        "{}", '{"type":7}', '{"type":["JOIN"]}', message("NOTHING"), message("join"),
        '{"type":"JOIN"}', '{"type":"JOIN","payload":null}', '{"type":"JOIN","payload":[]}',
        message("JOIN", {"tableId": ""}), message("JOIN", {"tableId": 7}),
        message("JOIN", {"tableId": "x" * 201}), message("JOIN", {"tableId": "é" * 101}),
        message("JOIN", {"tableId": "a\0b"}), message("JOIN", {"tableId": "a\nb"}),
        message("JOIN", {"token": 7}), message("JOIN", {"token": "x" * 8193}),
        message("JOIN", {"spectate": 1}), message("JOIN", requestId=7),
        message("JOIN", requestId=""), message("JOIN", requestId="x" * 101),
        message("ACTION_REQUEST", ACT), message("ACTION_REQUEST", requestId="r"),
        message("ACTION_REQUEST", {"actionType": 7}, requestId="r"),
        message("ACTION_REQUEST", ACT | {"expectedVersion": -1}, requestId="r"),
        message("ACTION_REQUEST", ACT | {"expectedVersion": 1.5}, requestId="r"),
        message("ACTION_REQUEST", ACT | {"expectedVersion": True}, requestId="r"),
        message("ACTION_REQUEST", ACT | {"expectedVersion": 2**53}, requestId="r"),
        message("ACTION_REQUEST", ACT, requestId="r", clientSeq=1),
        message("ACTION_REQUEST", ACT, requestId="r", clientSeq=0, clientId="c"),
        message("ACTION_REQUEST", ACT, requestId="r", clientSeq="1", clientId="c"),
        message("ACTION_REQUEST", ACT, requestId="r", clientSeq=1, clientId="x" * 65),
        message("REQUEST_SNAPSHOT", {"reason": "because"}),
        message("REQUEST_SNAPSHOT", {"reason": None}),
        message("REQUEST_SNAPSHOT", {"reason": ["gap"]}),
        message("REQUEST_SNAPSHOT", {"reason": {"gap": 1}}),
        message("REQUEST_SNAPSHOT", {"reason": 1}),
        message("REQUEST_SNAPSHOT", {"currentVersion": "3"}),
    ],
)  # fmt: skip
def test_what_is_no_message_of_ours_is_refused(text):
    with pytest.raises(Malformed) as wrong:
        asked(text)
    assert wrong.value.code == "INVALID"
    assert 0 < len(str(wrong.value)) <= 200


def test_what_is_wrong_is_told_with_the_id_it_came_with():
    with pytest.raises(Malformed) as wrong:
        asked(message("ACTION_REQUEST", {"actionType": 7}, requestId="r-1"))
    assert wrong.value.request_id == "r-1"


BEGUN = '{"type":"ACTION_REQUEST","requestId":"r-1","payload":{"x":'


@pytest.mark.parametrize(
    ("text", "id"),
    [
        (BEGUN, "r-1"),
        (BEGUN + "[" * 5000, "r-1"),
        (BEGUN + '"' + "x" * 70_000 + '"}}', "r-1"),
        (BEGUN.replace(":", ": ").replace(",", ", "), "r-1"),
        (BEGUN.replace("r-1", "\u00e9" * 50), "\u00e9" * 50),
        # It may be somebody else's, or is none.
        (BEGUN.replace("r-1", "\u00e9" * 51), None),
        (BEGUN.replace("r-1", "a\u200b"), None),
        (BEGUN.replace("r-1", "\\u0041"), None),
        (BEGUN.replace('"r-1"', "7"), None),
        (BEGUN.replace("r-1", ""), None),
        ("x" + BEGUN, None),
        ('{"x":' + BEGUN, None),
        ('{"payload":{"text":"' + BEGUN.replace('"', '\\"'), None),
        ('"' + BEGUN.replace('"', '\\"'), None),
        ('{"type":"JOIN","payload":{"requestId":"r-1"', None),
    ],
)
def test_what_nobody_can_read_is_told_by_the_id_it_begins_with(text, id):
    with pytest.raises(Malformed) as wrong:
        asked(text)
    assert wrong.value.request_id == id


@pytest.mark.parametrize(
    "odd",
    [
        "NaN", "-Infinity", "1e999", '"\\ud800"', "9" * 309, "-" + "9" * 309, "1" * 4300,
        "1" * 60_000, f'[[{{"x": {"7" * 5000}}}]]', "1" * 400 + ".5", "1e" + "9" * 5000,
    ],
)  # fmt: skip
def test_what_can_be_read_and_not_said_is_told_by_its_id(odd):
    with pytest.raises(Malformed) as wrong:
        asked(f'{{"x":{odd},"type":"PING","requestId":"r-1"}}')
    assert wrong.value.request_id == "r-1"


@pytest.mark.parametrize(
    "kind", ["JOIN", "LEAVE", "ACTION_REQUEST", "REQUEST_SNAPSHOT", "PING", "NOTHING"]
)
@pytest.mark.parametrize(
    "where",
    [
        "tableId", "cursor", "token", "spectate", "currentVersion", "reason", "expectedVersion",
        "x", "requestId", "clientId", "clientSeq", "type", "payload",
    ],
)  # fmt: skip
def test_integer_of_thousands_of_digits_is_refused_in_every_field(kind, where):
    outside = {"type": kind, "requestId": "r-1", "clientId": "c", "clientSeq": 1}
    payload = {"tableId": "t", "actionType": "sit"}
    odd = {where: "HERE"}
    text = json.dumps({**outside, "payload": {**payload, **odd}})
    if where in {*outside, "payload"}:
        text = json.dumps({**outside, "payload": payload, **odd})
    for digits in ("1" * 309, "1" * 4000, "-" + "1" * 4000, "1" * 5000, "1" * 60_000):
        with pytest.raises(Malformed) as wrong:
            asked(text.replace('"HERE"', digits))
        assert wrong.value.code == "INVALID"
        assert wrong.value.request_id == (None if where == "requestId" else "r-1")
        assert len(str(wrong.value)) <= 200


def test_integer_that_a_double_can_represent_is_taken():
    for number in (10**308 - 1, 1 - 10**308, 2**64):
        act = asked(message("ACTION_REQUEST", ACT | {"amount": number}, requestId="r"))
        assert act.action["amount"] == number


def test_the_size_of_a_message_is_that_of_its_bytes():
    text = message("ACTION_REQUEST", {"actionType": "\u00e9"}, requestId="r")
    text = json.dumps(json.loads(text), ensure_ascii=False)
    assert asked(text, len(text) + 1)
    for most in (len(text), len(text) - 1, 1):
        with pytest.raises(Malformed) as wrong:
            asked(text, most)
        assert wrong.value.code == "TOO_LARGE"
