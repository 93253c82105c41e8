"""The policy of the clients, without a client: values in, a value out."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel.client.retry import (
    PASSING,
    Again,
    Fault,
    Head,
    Patience,
    Sent,
    Stop,
    decide,
    head_of,
    is_running,
    settles,
)
from semel.errors import SettingsError

NOW_S = 784_111_777.0  # Sun, 06 Nov 1994 08:49:37 GMT, the date of RFC 9110
FIRST = Sent(1, 0.0, repeatable=True)
PATIENCE = Patience()


def problem(name):
    return f"urn:semel:problem:{name}"


# --- which endings ask for more -----------------------------------------------------------------


@pytest.mark.parametrize(
    "ending",
    [
        Fault(),
        *map(Head, sorted(PASSING)),
        Head(409, problem=problem("in-progress")),
        Head(409, retry_after_s=1.0),
        Head(409, retry_after_s=1.0, problem="https://elsewhere.example/busy"),
        Head(500, told=True),
    ],
    ids=repr,
)
def test_an_ending_that_passes_is_tried_again(ending):
    assert isinstance(decide(PATIENCE, FIRST, ending, 0.5), Again)
    assert decide(PATIENCE, Sent(1, 0.0, repeatable=False), ending, 0.5) == Stop("unrepeatable")


@pytest.mark.parametrize(
    "ending",
    [
        Fault(passing=False),
        *map(Head, [200, 201, 204, 303, 307, 400, 401, 404, 409, 410, 422, 500, 501]),
        Head(409, problem=problem("outcome-unknown")),
        Head(409, problem=problem("outcome-unknown"), retry_after_s=1.0),
        Head(422, retry_after_s=1.0),
        Head(503, told=False, retry_after_s=1.0),
        Head(201, told=True),
    ],
    ids=repr,
)
def test_an_ending_that_a_repeat_would_not_mend_is_final(ending):
    assert decide(PATIENCE, FIRST, ending, 0.5) == Stop("final")


def test_the_statuses_are_yours_to_choose():
    mine = Patience(statuses={409, 500})
    for status in (409, 500):
        assert isinstance(decide(mine, FIRST, Head(status), 0.5), Again)
    assert decide(mine, FIRST, Head(503), 0.5) == Stop("final")


# --- how long, how often ------------------------------------------------------------------------


@pytest.mark.parametrize(("tries", "ceiling_s"), [(1, 0.5), (2, 1), (3, 2), (7, 30), (5000, 30)])
def test_the_pause_is_a_random_part_of_a_doubling_ceiling(tries, ceiling_s):
    patience, sent = Patience(tries=10_000), Sent(tries, 0.0, repeatable=True)
    for chance in (0.0, 0.25, 0.999):
        assert decide(patience, sent, Fault(), chance) == Again(chance * ceiling_s)


def test_the_server_says_how_long_up_to_a_limit():
    assert decide(PATIENCE, FIRST, Head(503, retry_after_s=7.0), 0.1) == Again(7.0)
    assert decide(PATIENCE, FIRST, Head(503, retry_after_s=math.inf), 0.1) == Again(30.0)


def test_when_you_like_is_not_at_once():
    assert decide(PATIENCE, FIRST, Head(429, retry_after_s=0.0), 0.5) == Again(0.25)


def test_it_ends_with_the_tries_and_with_the_time():
    patience = Patience(tries=3, within_s=10.0)
    sent = [Sent(2, 9.0, repeatable=True), Sent(2, 9.1, repeatable=True)]
    busy = Head(503, retry_after_s=1.0)
    assert decide(patience, Sent(3, 0.0, repeatable=True), busy, 0.5) == Stop("tries")
    assert decide(patience, sent[0], busy, 0.5) == Again(1.0)
    assert decide(patience, sent[1], busy, 0.5) == Stop("time")


def test_an_answer_that_it_is_being_worked_on_is_no_failed_try():
    running = Head(409, retry_after_s=1.0, problem="urn:semel:problem:in-progress")
    patience = Patience(tries=3, within_s=10.0)
    assert decide(patience, Sent(3, 8.0, repeatable=True), running, 0.5) == Again(1.0)
    assert decide(patience, Sent(3, 9.5, repeatable=True), running, 0.5) == Stop("time")
    assert decide(Patience(tries=1), FIRST, running, 0.5) == Stop("tries")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    patience=st.builds(
        Patience,
        tries=st.integers(1, 8),
        within_s=st.floats(0, 1e4),
        backoff_s=st.floats(0, 100),
        longest_s=st.floats(0, 100),
    ),
    endings=st.lists(
        st.one_of(
            st.just(Fault()),
            st.builds(
                Head, st.sampled_from([409, 500, 503]), st.none() | st.floats(0, 1e6), st.booleans()
            ),
        ),
        min_size=9,
        max_size=9,
    ),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_whatever_comes_it_ends_in_time(patience, endings, chance):
    elapsed_s, tries = 0.0, 0
    for ending in endings:
        tries += 1
        decision = decide(patience, Sent(tries, elapsed_s, repeatable=True), ending, chance)
        if isinstance(decision, Stop):
            break
        tries -= is_running(ending)
        assert 0 <= decision.delay_s <= patience.longest_s
        elapsed_s += decision.delay_s
    assert tries <= patience.tries
    assert elapsed_s <= patience.within_s


@pytest.mark.parametrize(
    "settings",
    [{"tries": 0}, {"within_s": -1}, {"backoff_s": math.nan}, {"longest_s": -0.1}],
    ids=repr,
)
def test_a_patience_that_cannot_work_is_refused(settings):
    with pytest.raises(SettingsError, match=next(iter(settings))):
        Patience(**settings)


def test_the_reference_has_every_default():
    page = (Path(__file__).parents[2] / "docs/reference/client.md").read_text()
    for field in dataclasses.fields(Patience):
        shown = set(field.default) if field.name == "statuses" else field.default
        [written] = re.findall(rf"^\| `{field.name}` \| `(.+?)` \|", page, re.MULTILINE)
        assert ast.literal_eval(written) == shown


# --- reading an answer --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("120", 120.0),
        ("0", 0.0),
        ("1.5", 1.5),
        ("-3", 0.0),
        ("9" * 400, math.inf),
        ("Sun, 06 Nov 1994 08:50:07 GMT", 30.0),
        ("Sunday, 06-Nov-94 08:50:07 GMT", 30.0),
        ("Sun, 06 Nov 1994 08:49:00 GMT", 0.0),
        ("Sun, 06 Nov 1994 08:50:07 -0000", 30.0),
        ("nan", None),
        ("soon", None),
        ("1, 2", None),
        ("", None),
    ],
)
def test_retry_after_in_all_its_forms(text, seconds):
    assert head_of(503, {"Retry-After": text}, wall_s=NOW_S).retry_after_s == seconds


def test_a_date_is_read_by_the_servers_clock():
    headers = {"Retry-After": "Sun, 06 Nov 1994 08:50:07 GMT"}
    ahead = {**headers, "Date": "Sun, 06 Nov 1994 08:50:02 GMT"}
    assert head_of(503, ahead, wall_s=0.0).retry_after_s == 5.0
    assert head_of(503, {**headers, "Date": "?"}, wall_s=NOW_S).retry_after_s == 30.0


@pytest.mark.parametrize(("text", "told"), [("true", True), ("False", False), ("maybe", None)])
def test_the_servers_own_word(text, told):
    assert head_of(500, {"Stripe-Should-Retry": text}, wall_s=0.0).told is told


@pytest.mark.parametrize(
    ("media", "body", "found"),
    [
        ("application/problem+json", b'{"type": "urn:x"}', "urn:x"),
        ("Application/Problem+JSON; charset=utf-8", b'{"type": "urn:x"}', "urn:x"),
        ("application/json", b'{"type": "urn:x"}', None),
        ("application/problem+json", b'{"type": 7}', None),
        ("application/problem+json", b'["type"]', None),
        ("application/problem+json", b"\xff", None),
        ("application/problem+json", b"[" * 100_000, None),
        ("application/problem+json", None, None),
    ],
    ids=str,
)
def test_the_type_of_a_problem(media, body, found):
    head = head_of(409, {"Content-Type": media}, wall_s=0.0, body=body)
    assert head.problem == found


# --- was that the answer? -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        *map(Head, [200, 201, 204, 302, 303, 400, 403, 404, 409, 410, 413, 422]),
        Head(410, problem=problem("response-not-kept")),
    ],
    ids=repr,
)
def test_an_answer_that_says_how_it_ended(head):
    assert settles(PATIENCE, head)


@pytest.mark.parametrize(
    "head",
    [
        *map(Head, [307, 308, 401, 407, 408, 425, 429, 500, 502, 503, 504]),
        Head(409, retry_after_s=1.0),
        Head(409, problem=problem("in-progress"), told=False),
        Head(409, problem=problem("outcome-unknown")),
        Head(422, problem=problem("key-reused")),
        Head(400, told=True),
    ],
    ids=repr,
)
def test_an_answer_that_does_not(head):
    assert not settles(PATIENCE, head)
    assert not settles(Patience(statuses=frozenset()), head)


def test_a_status_that_you_repeat_does_not_say_how_it_ended():
    assert not settles(Patience(statuses={404}), Head(404))
