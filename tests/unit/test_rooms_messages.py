from __future__ import annotations

import json

import pytest

from semel.entries import Position
from semel.rooms import Reply, messages
from semel.rooms.asking import Act

ACT = Act("r-1", "t", {"actionType": "raise", "amount": 5})


def test_a_result_says_what_was_asked_and_what_came_of_it():
    assert json.loads(messages.result(ACT, Reply(7, {"pot": 1}, cached=True))) == {
        "type": "ACTION_RESULT",
        "requestId": "r-1",
        "payload": {
            "tableId": "t",
            "success": True,
            "cached": True,
            "stateVersion": 7,
            "action": {"type": "raise", "amount": 5},
            "reply": {"pot": 1},
        },
    }
    refused = json.loads(messages.result(ACT, Reply(7, None, "NO", "not now")))["payload"]
    assert (refused["success"], "reply" in refused) == (False, False)
    assert refused["error"] == {"code": "NO", "message": "not now"}


@pytest.mark.parametrize("retry_s", [None, 0.2])
def test_what_is_not_decided_says_whether_to_send_it_again(retry_s):
    again = {} if retry_s is None else {"retry": True, "retryAfterMs": 200}
    unsettled = json.loads(messages.unsettled(ACT, "X", "why", retry_s=retry_s))["payload"]
    assert unsettled["error"] == {"code": "X", "message": "why", **again}
    assert "stateVersion" not in unsettled
    error = json.loads(messages.error("X", "why", request_id="r", room_id="t", retry_s=retry_s))
    assert error == {
        "type": "ERROR",
        "requestId": "r",
        "payload": {"code": "X", "message": "why", **again, "tableId": "t"},
    }


def test_others_are_short():
    assert json.loads(messages.left(None, "t", "left")) == {
        "type": "LEFT",
        "payload": {"tableId": "t", "reason": "left"},
    }
    beat = json.loads(messages.heartbeat(1.5, {"t": Position(4, "0123456789ab")}))
    assert beat["payload"] == {"serverTime": 1500, "heads": {"t": "4.0123456789ab"}}
    here = json.loads(messages.presence("t", ["ann"], 2))["payload"]
    assert here == {"tableId": "t", "users": ["ann"], "spectators": 2}
    assert json.loads(messages.error("X", "why")) == {
        "type": "ERROR",
        "payload": {"code": "X", "message": "why"},
    }
