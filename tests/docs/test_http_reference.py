"""The HTTP reference says what the code does."""

from __future__ import annotations

import ast
import dataclasses
import re
from itertools import dropwhile, takewhile
from pathlib import Path

import pytest

from semel import keys
from semel.http import RequestAttempt, Rule
from semel.http.protocol import NEVER_KEPT, PROBLEMS
from semel.http.request import STREAMS
from semel.http.rule import NEVER_STORED

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text()


def rows(heading):
    """The cells of the first table below a heading, without its head."""
    body = re.split(rf"^## {heading}$", PAGE, flags=re.MULTILINE)[1]
    after = dropwhile(lambda line: not line.startswith("|"), body.splitlines())
    lines = takewhile(lambda line: line.startswith("|"), after)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines][2:]


def test_every_option_of_a_rule_is_described_with_its_default():
    written = {row[0].strip("`"): ast.literal_eval(row[1].strip("`")) for row in rows("Rule")}
    assert written == {field.name: field.default for field in dataclasses.fields(Rule)}


def test_every_problem_is_described_with_its_status():
    written = {row[0].strip("`"): int(row[1]) for row in rows("Problems")}
    assert written == {name: status for name, (status, _) in PROBLEMS.items()}


def test_what_is_never_recorded_is_listed():
    first, *_ = rows("Which responses are recorded")
    assert {int(status) for status in first[0].split(", ")} == NEVER_STORED


@pytest.mark.parametrize("header", sorted(name.decode() for name in NEVER_KEPT))
def test_a_header_that_is_never_replayed_is_named(header):
    family = "proxy-*" if header.startswith("proxy-") else header.removesuffix("2")
    assert f"`{family}`" in PAGE.lower()


@pytest.mark.parametrize("kind", [kind.decode() for kind in STREAMS])
def test_what_counts_as_a_stream_is_named(kind):
    assert f"`{kind}`" in PAGE


def test_the_limit_of_a_key_is_the_one_that_holds():
    assert f"1 to {keys.LIMIT} characters" in PAGE


def test_what_an_attempt_has_is_described():
    written = {name for row in rows("RequestAttempt") for name in re.findall(r"`(\w+)[`(]", row[0])}
    for name in written:
        assert hasattr(RequestAttempt, name), name
