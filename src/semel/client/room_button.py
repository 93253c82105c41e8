"""A button that is enabled by how a table stands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from semel.client.room_values import ActionResult

if TYPE_CHECKING:
    from semel.client.room import Table


def button(table: Table, *, enabled_when: Callable[[Any], bool]) -> Button:
    return Button(table, enabled_when)


class Button:
    """Enabled by how the table stands, and never by a reply alone.

    It is while `enabled_when` says so of the confirmed state, nothing of ours is on its way, and
    that state is as new as the last answer.
    """

    def __init__(self, table: Table, enabled_when: Callable[[Any], bool]) -> None:
        self._table = table
        self._enabled_when = enabled_when

    @property
    def is_enabled(self) -> bool:
        return self._table.is_settled and bool(self._enabled_when(self._table.confirmed))

    def press(self, action: Mapping[str, Any]) -> asyncio.Future[ActionResult] | None:
        """Act, if it is enabled; else None, and nothing is sent."""
        return self._table.act(action) if self.is_enabled else None
