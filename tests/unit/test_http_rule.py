"""Rules: which settings cannot work, and which rule holds for which request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semel.errors import SettingsError
from semel.http import IdempotencyMiddleware, Rule, WSGIMiddleware
from semel.http.rule import Rules, Ruling, changed
from semel.policy import Recovered
from semel.stores import MemoryStore


def ruling(**settings):
    return Ruling(Rule(**settings), "shop")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"key": "maybe"}, "optional"),
        ({"on_error": "ignore"}, "release"),
        ({"on_crash": "retry"}, "release"),
        ({"on_error": "hold", "on_crash": "release"}, "taken over"),
        ({"stores": {200, 401}}, "401"),
        ({"max_body": -1}, "max_body"),
        ({"max_response": 1.5}, "max_response"),
        ({"methods": "POST"}, "one word"),
        ({"fingerprint": "xml"}, "xml"),
        ({"ttl": 0}, "ttl"),
        ({"lease": 100, "ttl": 50}, "lease"),
        ({"scope": ""}, "tenant"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_where_it_is_made(settings, says):
    with pytest.raises(SettingsError, match=says):
        ruling(**settings)


def test_retention_is_an_older_spelling_of_ttl():
    assert Rule(retention=60) == Rule(ttl=60)
    assert Rule(retention=None).ttl is None
    assert Rule().ttl == 86_400
    assert replace(Rule(retention=60), lease=5).ttl == 60


def test_ttl_and_retention_together_are_refused():
    with pytest.raises(SettingsError, match="leave retention=50 out"):
        Rule(ttl=60, retention=50)


def test_changed_rule_takes_either_spelling_of_ttl():
    assert changed(Rule(retention=60), {"retention": 90}).ttl == 90
    assert changed(Rule(ttl=60), {"ttl": 90, "lease": 5}) == Rule(ttl=90, lease=5)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"lease": 3}, r"rule={'lease': 3} is a dict; write rule=Rule\(lease=3\)"),
        ({}, r"rule={} is a dict; write rule=Rule\(\)"),
        ("required", r"rule='required' is a str; write rule=Rule\(\.\.\.\)"),
        (Rule, "is a type; write"),
    ],
)
def test_rule_of_another_type_is_refused(given, says):
    for middleware in (IdempotencyMiddleware, WSGIMiddleware):
        with pytest.raises(SettingsError, match=says):
            middleware(lambda *_: None, store=MemoryStore(), scope="shop", rule=given)


def test_a_route_whose_rule_is_a_dict_is_refused():
    routes = {"/orders": {"lease": 3}}
    with pytest.raises(SettingsError, match=r"routes\['/orders'\]={'lease': 3}.*Rule\(lease=3\)"):
        IdempotencyMiddleware(lambda *_: None, store=MemoryStore(), scope="shop", routes=routes)


@pytest.mark.parametrize("scope", [None, "", 7])
def test_a_door_without_a_scope_is_refused(scope):
    with pytest.raises(SettingsError, match="whose key"):
        IdempotencyMiddleware(lambda *_: None, store=MemoryStore(), scope=scope)


@pytest.mark.parametrize("status", [200, 201, 204, 302, 400, 404, 405, 409, 410, 422])
def test_an_answer_of_the_handler_is_kept(status):
    assert ruling().keeps(status, routed=True)


@pytest.mark.parametrize("status", [401, 403, 408, 413, 425, 429])
def test_who_was_not_let_in_has_had_no_effect(status):
    assert not ruling().keeps(status, routed=True)
    assert not ruling(stores=lambda _: True).keeps(status, routed=True)


@pytest.mark.parametrize("status", [404, 405])
def test_a_router_that_found_nobody_is_not_kept(status):
    assert not ruling().keeps(status, routed=False)


def test_which_statuses_are_kept_can_be_chosen():
    assert ruling(stores={201}).keeps(201, routed=True)
    assert not ruling(stores={201}).keeps(200, routed=True)
    assert not ruling(stores=lambda status: status < 300).keeps(400, routed=True)


def test_a_crash_means_what_an_error_means_unless_said():
    assert ruling(on_error="release").policy.terms.takeover
    assert not ruling(on_error="hold").policy.terms.takeover
    assert not ruling(on_crash="hold").policy.terms.takeover
    recover = ruling(on_error="store").policy.recover
    assert recover is not None
    found = recover(None)
    assert isinstance(found, Recovered)
    assert found.value.status == 500


RULES = Rules(
    Rule(),
    "shop",
    {
        "/payments/{id}": Rule(key="required", methods=["post"]),
        "/payments/*": None,
        "/a.c": Rule(key="required"),
    },
)


@pytest.mark.parametrize(
    ("method", "path", "found"),
    [
        ("POST", "/orders", "optional"),
        ("PATCH", "/orders", "optional"),
        ("GET", "/orders", None),
        ("PUT", "/orders", None),
        ("POST", "/payments/7", "required"),
        ("PATCH", "/payments/7", None),
        ("POST", "/payments/7/refunds", None),
        ("POST", "/payments", "optional"),
        ("POST", "/payments/", None),
        ("POST", "/a.c", "required"),
        ("POST", "/abc", "optional"),
    ],
)
def test_the_first_route_that_fits_rules(method, path, found):
    rule = RULES.find(method, path)
    assert (None if rule is None else rule.rule.key) == found


def test_a_route_is_a_path():
    with pytest.raises(SettingsError, match="slash"):
        Rules(Rule(), "shop", {"POST /orders": Rule()})
