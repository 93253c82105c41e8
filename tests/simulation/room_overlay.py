"""What a page shows before it is answered, held against what has come of it.

What the simulated pages guess is what was clicked: an action is shown as its click, on top of what
is confirmed. So what is on top and what is below can always be told apart, and whether a state has
a click already is known to the history.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from room_history import Node

from semel.client.room_values import State

ON_TOP = "on top"


def guess(state: Any, action: Mapping[str, Any]) -> Any:
    """Changes what it is given, as pages do; and cannot tell what comes of everything."""
    if action["actionType"] == "boom":
        raise KeyError("no page can tell")
    state.setdefault(ON_TOP, []).append(action["click"])
    return state


class Overlay:
    """What one page shows on top. `wrong` is told what is not as it was promised.

    `ids` are the requests, as the log knows them, by what was clicked. `is_again` says that one was
    done before and forgotten, so that it is right to do it again.
    """

    def __init__(
        self,
        wrong: Callable[[str], None],
        ids: Mapping[str, str],
        is_again: Callable[[str], bool],
    ) -> None:
        self._wrong = wrong
        self._ids = ids
        self._is_again = is_again
        self._refused: set[str] = set()
        self._stay: set[str] = set()
        """Clicks that are shown, and are not to disappear."""

    def refused(self, click: str) -> None:
        self._refused.add(click)
        self._stay.discard(click)

    def unknown(self, click: str) -> None:
        """Its time is up: whether it is in the state by now, nobody can tell."""
        self._stay.discard(click)

    def may_go(self) -> None:
        """What was told just now may be all there is: what was shown need not be in it."""
        self._stay.clear()

    def shown(self, news: State, nodes: set[Node]) -> None:
        """`nodes` is what the confirmed state may be."""
        below = dict(news.state)
        on_top: list[str] = below.pop(ON_TOP, [])
        if below != news.confirmed:
            self._wrong("what is below is not what is confirmed")
        if on_top and not news.pending:
            self._wrong("nothing is pending, and something is shown on top")
        if len(set(on_top)) < len(on_top):
            self._wrong(f"an action is shown twice on top: {on_top}")
        self._check_each(on_top, nodes)
        for click in sorted(self._stay.difference(on_top)):
            if not any(node.has(self._ids[click]) for node in nodes):
                self._wrong(f"what was shown is gone, and was not refused: {click}")
        self._stay = set(on_top)

    def _check_each(self, on_top: list[str], nodes: set[Node]) -> None:
        for click in on_top:
            if click in self._refused:
                self._wrong(f"what was refused is still shown: {click}")
            id = self._ids[click]
            if nodes and all(node.has(id) for node in nodes) and not self._is_again(id):
                self._wrong(f"an action is shown on top of a state that has it: {click}")
