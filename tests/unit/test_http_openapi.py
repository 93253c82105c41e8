"""What is published about keys is what holds."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from semel import keys
from semel.http import Refusal, Rule
from semel.http.openapi import PATTERN, duration, operation, parameter, problems
from semel.http.protocol import PROBLEMS, parse_key
from semel.http.rule import Ruling

TEXT = st.text(st.characters(max_codepoint=0x7F), max_size=12)


def ruling(**options):
    return Ruling(Rule(**options), "tenant")


def taken(content):
    try:
        parse_key([content.encode()])
    except Refusal:
        return False
    return True


@given(TEXT | TEXT.map(lambda text: f'"{text}"'))
@example('""')
@example('"a\\"b"')
@example("a;b")
@example("k\n")
def test_the_pattern_is_what_is_taken(content):
    assert (re.search(PATTERN, content) is not None and content[-1:] != "\n") is (
        taken(content) and content == content.strip(" \t")
    )


def test_the_published_length_is_taken():
    longest = parameter(ruling())["schema"]["maxLength"]
    assert longest == keys.LIMIT
    assert taken("k" * longest)
    assert not taken("k" * (longest + 1))


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (1, "1 second"),
        (90, "90 seconds"),
        (60, "1 minute"),
        (3600, "1 hour"),
        (5400, "90 minutes"),
        (86_400, "24 hours"),
        (2 * 86_400, "48 hours"),
        (7 * 86_400, "7 days"),
        (0.5, "0.5 seconds"),
    ],
)
def test_a_duration_is_told_in_its_largest_whole_unit(seconds, said):
    assert duration(seconds) == said


def test_a_response_that_is_kept_for_good_is_told_so():
    assert "kept for good" in parameter(ruling(ttl=None))["description"]
    assert operation(ruling(ttl=None), "201", ())["x-idempotency-retention"] is None


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"key": "required"}, "key-missing"),
        ({"fingerprint": "json"}, "body-malformed"),
        ({"on_error": "hold"}, "outcome-unknown"),
        ({"on_crash": lambda _attempt: None}, "outcome-unknown"),
        ({"on_error": "store"}, "interrupted"),
        ({"on_crash": "store"}, "interrupted"),
    ],
)
def test_a_problem_is_told_of_where_its_rule_makes_it_possible(options, name):
    assert name in problems(ruling(**options))
    assert name not in problems(ruling())


def test_what_is_stored_after_a_crash_is_never_unknown():
    assert "outcome-unknown" not in problems(ruling(on_error="store"))


def test_every_problem_that_is_possible_is_an_answer():
    every = ruling(key="required", fingerprint="json", on_error="store")
    said = operation(every, "201", ())["responses"]
    for name in problems(every):
        assert f"`urn:semel:problem:{name}`" in said[str(PROBLEMS[name][0])]["description"]
