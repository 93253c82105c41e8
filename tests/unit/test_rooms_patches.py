from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.rooms.patches import diff, patched
from semel.rooms.standing import said

KEYS = st.sampled_from(["a", "b", "", "0", "é"])
LEAVES = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, -0.0, 1.0, "x", ""])
VALUES = st.recursive(
    LEAVES, lambda v: st.lists(v, max_size=4) | st.dictionaries(KEYS, v, max_size=4), max_leaves=20
)


@settings(max_examples=400, database=None)
@given(VALUES, VALUES)
def test_a_patch_makes_the_one_from_the_other_to_the_letter(before, after):
    kept = copy.deepcopy(before)
    patch = json.loads(said(diff(before, after)))
    made = patched(before, patch)
    assert json.dumps(made, sort_keys=True) == json.dumps(after, sort_keys=True)
    assert said(before) == said(kept), "what it was made from stays as it is"


@settings(max_examples=100, database=None)
@given(VALUES)
def test_nothing_is_the_patch_between_equals(value):
    assert diff(value, copy.deepcopy(value)) == []
    assert patched(value, []) == value


@pytest.mark.parametrize(
    ("before", "after", "patch"),
    [
        ({"a": 1}, {"a": 2}, [[["a"], 2]]),
        ({"a": 1}, {}, [[["a"]]]),
        ({}, {"a": None}, [[["a"], None]]),
        ({"a": 1}, {"a": True}, [[["a"], True]]),
        ({"a": 1}, {"a": 1.0}, [[["a"], 1.0]]),
        ({"a": [1, 2, 3]}, {"a": [1]}, [[["a", 2]], [["a", 1]]]),
        ([1], [1, 2, 3], [[[1], 2], [[2], 3]]),
        ([1, 2, 3], [1, 3], [[[2]], [[1], 3]]),
        ({"a": {"b": [0, {"c": 1}]}}, {"a": {"b": [0, {"c": 2}]}}, [[["a", "b", 1, "c"], 2]]),
        ({"a": 1}, [1], [[[], [1]]]),
        ({"a": {}}, {"a": []}, [[["a"], []]]),
        (None, {"a": 1}, [[[], {"a": 1}]]),
        ({"1": "text"}, {"1": "other"}, [[["1"], "other"]]),
    ],
)
def test_a_patch_says_only_what_is_different(before, after, patch):
    assert said(diff(before, after)) == said(patch)
    assert said(patched(before, patch)) == said(after)
