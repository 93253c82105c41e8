"""A table that fits: what matters most is shown, what is long is cut in the middle.

A listing is read from top to bottom, and a row that wraps is not read at all. So where a
terminal is too narrow, the least important columns go first, and then long cells lose their
middle: of a key, a host or a function, both ends tell. `--wide` and `--json` have all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["Column", "fit", "print_fitted"]

GAP = 2
CUT = "…"


@dataclass(frozen=True, slots=True)
class Column:
    """`rank` 0 is never left out. `least` is the width from which on it is worth its place.

    A column that `folds` is not cut but goes on in the next line.
    """

    name: str
    rank: int
    least: int
    folds: bool = False


def fit(columns: Sequence[Column], natural: Sequence[int], width: int) -> dict[int, int]:
    """The columns that are shown, by their place, and how wide each may be."""
    shown = {n: min(c.least, natural[n]) for n, c in enumerate(columns) if natural[n]}
    for n in sorted(shown, key=lambda n: columns[n].rank, reverse=True):
        if columns[n].rank and _total(shown) > width:
            del shown[n]
    for n in sorted(shown, key=lambda n: columns[n].rank):
        shown[n] += max(0, min(natural[n] - shown[n], width - _total(shown)))
    return shown


def _total(widths: dict[int, int]) -> int:
    return sum(widths.values()) + GAP * (len(widths) - 1)


def cut(text: str, width: int) -> str:
    """The text in at most so many cells, its middle left out."""
    if cell_len(text) <= width:
        return text
    head = (width - 1) // 2
    tail = text[::-1]
    end = set_cell_size(tail, width - 1 - head)[::-1]
    return set_cell_size(text, head) + CUT + end


def print_fitted(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, width: int) -> bool:
    """Print the rows on a terminal. Was everything shown, and whole?"""
    natural = [_natural(column, [row[n] for row in rows]) for n, column in enumerate(columns)]
    shown = fit(columns, natural, width)
    table = Table(box=None, header_style="dim", padding=(0, GAP, 0, 0), pad_edge=False)
    for n in sorted(shown):
        table.add_column(columns[n].name, width=shown[n], overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[n], columns[n], shown[n]) for n in sorted(shown)))
    Console(highlight=False, width=_total(shown)).print(table)
    whole = all(columns[n].folds or shown[n] == natural[n] for n in shown)
    return whole and len(shown) == sum(map(bool, natural))


def _natural(column: Column, cells: Sequence[str]) -> int:
    """How wide it would like to be; 0 when it has nothing to say, such as tenants nobody has."""
    widest = max(map(cell_len, cells), default=1)
    return max(widest, cell_len(column.name)) if widest else 0


def _cell(text: str, column: Column, width: int) -> Text:
    return Text(text if column.folds else cut(text, width))
