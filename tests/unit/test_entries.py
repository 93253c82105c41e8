"""What a log is told, as values: what of it is refused before any store hears of it."""

from __future__ import annotations

import math

import pytest

from semel.entries import LONGEST_S, Keep
from semel.errors import SettingsError


@pytest.mark.parametrize("field", ["ids_s", "ended_s", "idle_s"])
@pytest.mark.parametrize("seconds", [-1, -0.001, math.inf, math.nan, LONGEST_S + 1, "60", True])
def test_a_duration_that_no_store_can_keep_is_refused(field, seconds):
    with pytest.raises(SettingsError, match=f"{field} is"):
        Keep(**{field: seconds})


@pytest.mark.parametrize("field", ["ids_s", "ended_s"])
def test_ids_and_what_has_ended_are_not_kept_for_ever(field):
    with pytest.raises(SettingsError, match=f"{field} is None"):
        Keep(**{field: None})


@pytest.mark.parametrize("field", ["entries", "full"])
@pytest.mark.parametrize("number", [-1, 1.5, 1.0, True, "1", 2**53])
def test_a_number_of_entries_that_no_store_can_count_is_refused(field, number):
    with pytest.raises(SettingsError, match=f"{field} is"):
        Keep(**{field: number})


def test_what_may_be_kept():
    Keep(0, 0, 0, 0, 0)
    Keep(2**53 - 1, 2**53 - 1, LONGEST_S, LONGEST_S, LONGEST_S)
    Keep(entries=None, full=None, idle_s=None)
