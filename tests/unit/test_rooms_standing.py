from __future__ import annotations

import pytest

from semel.entries import Snapshot, beginning
from semel.rooms import Deadline, Room
from semel.rooms.standing import Standing, plain, said
from support.rooms import Cards

AT = beginning("s")


class Asked(Room):
    """Counts how often it is asked, and spoils what it is given."""

    def __init__(self):
        self.count = 0

    def begin(self, room_id):
        return {"of": room_id}

    def apply(self, state, action, ctx):
        raise NotImplementedError

    def view(self, state, viewer):
        self.count += 1
        state["viewer"] = viewer
        return state

    def members(self, state):
        state.clear()
        return ["ann", "bob", "ann"]

    def deadline(self, state):
        state.clear()
        return Deadline("t", 1.0)

    def result(self, state, viewer):
        return (state.pop("a"), viewer)


def test_a_room_in_which_nothing_has_happened_is_as_it_begins():
    for standing in (
        Standing.of(Asked(), "r", Snapshot(AT, "unknown")),
        Standing.at_the_beginning(Asked(), "r", "s"),
    ):
        assert (standing.version, standing.position) == (0, AT)
        assert standing.state() == {"of": "r"}


def test_it_is_asked_once_for_each_viewer_and_gives_the_state_as_it_is_kept():
    room = Asked()
    standing = Standing.of(room, "r", Snapshot(AT, "open", b'{"a":[1,2]}'))
    for _ in range(2):
        assert standing.view("ann") == {"a": [1, 2], "viewer": "ann"}
        assert standing.view(None) == {"a": [1, 2], "viewer": None}
        assert standing.shown_view("stranger") is standing.shown_view(None)
        assert standing.result("bob") == [[1, 2], "bob"]
        assert list(standing.members) == ["ann", "bob"]
        assert standing.deadline == Deadline("t", 1.0)
    assert room.count == 2
    standing.view("ann")["a"].append(3)
    standing.result("bob")[0].append(3)
    assert (standing.view("ann")["a"], standing.result("bob")[0]) == ([1, 2], [1, 2])
    standing.state()["a"].append(3)
    assert standing.state() == {"a": [1, 2]}


def test_somebody_who_is_no_member_is_everybody_else():
    room = Cards()
    standing = Standing.of(room, "r", Snapshot(AT, "unknown"))
    assert standing.viewer_of("ann") is None
    assert standing.viewer_of(None) is None


def test_a_view_that_is_the_state_with_something_else_in_it_is_what_json_makes_of_it():
    class Tuples(Asked):
        def view(self, state, viewer):
            state["x"] = (1, 2)
            return state

        def members(self, state):
            return ()

    standing = Standing.of(Tuples(), "r", Snapshot(AT, "unknown"))
    assert standing.view(None) == {"of": "r", "x": [1, 2]}


def test_what_is_plain_is_what_was_written_and_read():
    assert plain({"a": (1, {"b": True})}, "it") == {"a": [1, {"b": True}]}
    assert plain(None, "it") is None
    assert said({"é": 1.0}) == '{"é":1.0}'
    for wrong in (float("nan"), float("inf"), {1}, b"x", {(1,): 1}, object()):
        with pytest.raises((TypeError, ValueError)):
            said(wrong)


KEYS = {
    "a number": ({1: 2}, "it has the key 1, and would come back from JSON with the key '1'"),
    "nothing": (
        {None: 2},
        "it has the key None, and would come back from JSON with the key 'null'",
    ),
    "a truth": ({"a": [0, {True: 2}]}, "it['a'][1] has the key True"),
    "behind a tuple": ({"a": ({"b": 1}, {"b": {2.5: 2}})}, "it['a'][1]['b'] has the key 2.5"),
}


@pytest.mark.parametrize(("what", "said"), KEYS.values(), ids=KEYS)
def test_a_key_that_is_no_text_is_an_error_that_says_where_it_is(what, said):
    with pytest.raises(TypeError) as error:
        plain(what, "it")
    assert str(error.value).startswith(said)
    assert "str(key)" in str(error.value)
