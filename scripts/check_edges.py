"""Every case in tests/edges.toml has a test that exists, or says why it has none.

    python scripts/check_edges.py            fail on a row without tests and without a why, on a
                                             test that is not there, on a page that is out of date
    python scripts/check_edges.py --write    write docs/reference/edges.md anew

Tests are looked up in the source, not collected: this takes a second and imports nothing.
"""

from __future__ import annotations

import ast
import functools
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "edges.toml"
PAGE = ROOT / "docs" / "reference" / "edges.md"
FIELDS = {"area", "when", "then", "tests", "why", "page"}

Row = dict[str, Any]


# --- tests in the source ------------------------------------------------------------------------


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def named(body: list[ast.stmt], name: str) -> ast.AST | None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return next((node for node in body if isinstance(node, kinds) and node.name == name), None)


def module_path(name: str) -> Path | None:
    """Where a module of ours lies."""
    parts = Path(*name.split("."))
    for folder in (ROOT / "src", ROOT / "tests"):
        for path in (folder / parts.with_suffix(".py"), folder / parts / "__init__.py"):
            if path.exists():
                return path
    return None


def find_class(path: Path, name: str) -> tuple[Path, ast.ClassDef] | None:
    """A class of this module, or one that the module imports."""
    found = named(parsed(path).body, name)
    if isinstance(found, ast.ClassDef):
        return path, found
    for node in parsed(path).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name and (source := module_path(node.module)):
                    return find_class(source, alias.name)
    return None


def has_method(path: Path, class_name: str, test: str) -> bool:
    """Does the class have this test, of its own or from a base?"""
    found = find_class(path, class_name)
    if found is None:
        return False
    where, node = found
    if named(node.body, test) is not None:
        return True
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return any(has_method(where, base, test) for base in bases)


def exists(test_id: str) -> bool:
    file, _, inside = test_id.partition("::")
    path = ROOT / file
    *classes, test = inside.split("::")
    if not (path.is_file() and test.startswith("test_")):
        return False
    if not classes:
        return isinstance(named(parsed(path).body, test), (ast.FunctionDef, ast.AsyncFunctionDef))
    return len(classes) == 1 and has_method(path, classes[0], test)


def tests_in(file: str) -> Iterator[str]:
    """The ids of the tests at the top of a file."""
    for node in parsed(ROOT / file).body:
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_function and node.name.startswith("test_"):
            yield f"{file}::{node.name}"


# --- the table ----------------------------------------------------------------------------------


def faults(table: dict[str, Any]) -> Iterator[str]:
    rows: list[Row] = table["edge"]
    for row in rows:
        yield from (f"{row.get('when', '?')!r}: {fault}" for fault in row_faults(row))
    for when, count in Counter((row["area"], row["when"]) for row in rows).items():
        if count > 1:
            yield f"{when[1]!r}: there are {count} such rows"
    shown = {test for row in rows for test in row.get("tests", ())}
    for file in table["complete"]:
        yield from (f"{test}: no row names it" for test in tests_in(file) if test not in shown)


def row_faults(row: Row) -> Iterator[str]:
    if unknown := sorted(set(row) - FIELDS):
        yield f"unknown field {unknown[0]!r}"
    if not all(row.get(name) for name in ("area", "when", "then")):
        yield "area, when and then must say something"
    if not row.get("tests") and not row.get("why"):
        yield "no test; name one, or say why there is none"
    if row.get("why") and not (row.get("page") and (ROOT / row["page"]).is_file()):
        yield f"a why needs a page that says it; there is no {row.get('page')!r}"
    for test in row.get("tests", ()):
        if not exists(test):
            yield f"there is no test {test}"


# --- the page -----------------------------------------------------------------------------------

HEAD = """# Edge cases

What goes wrong around a guarded call, and on an event's way from commit to effect or from a worker
to everybody who watches, what happens then, and the test that shows it. A test under
`tests/contract/` runs on every store; one of them is named here. The table is
[`tests/edges.toml`](../../tests/edges.toml); `make check` fails when a row has no test.
"""


def page(rows: list[Row]) -> str:
    areas = dict.fromkeys(row["area"] for row in rows)
    parts = [HEAD]
    for area in areas:
        lines = [line(row) for row in rows if row["area"] == area]
        parts.append(f"## {area}\n\n| When | Then | Shown by |\n|---|---|---|\n" + "\n".join(lines))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def line(row: Row) -> str:
    shown = "<br>".join(links(row.get("tests", ()))) or f"none: {row['why']}"
    return (
        "| "
        + " | ".join(cell.replace("|", "\\|") for cell in (row["when"], row["then"], shown))
        + " |"
    )


def links(tests: list[str]) -> list[str]:
    """One link per test; the same contract on several stores is one test."""
    by_name = {test.rpartition("::")[2]: test for test in reversed(tests)}
    return [
        f"[`{name}`](../../{by_name[name].partition('::')[0]})"
        for name in dict.fromkeys(test.rpartition("::")[2] for test in tests)
    ]


def main() -> int:
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    rows: list[Row] = table["edge"]
    text = page(rows)
    if "--write" in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    found = list(faults(table))
    if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        found.append(f"{PAGE.relative_to(ROOT)} is out of date; run {sys.argv[0]} --write")
    for fault in found:
        print(f"edges: {fault}", file=sys.stderr)
    tests = {test for row in rows for test in row.get("tests", ())}
    reasons = sum(not row.get("tests") for row in rows)
    print(
        f"edges: {len(rows)} cases, {len(tests)} tests, {reasons} without a test and with a reason"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
