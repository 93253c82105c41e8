"""The documentation is true: its examples run, its links lead somewhere, its tables agree."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path
from typing import NamedTuple

import pytest

import semel
from semel import errors, values
from semel.keys.digest import LIMIT
from support.zygote import script

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUARANTEES = DOCS / "explanation" / "guarantees.md"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
SNIPPETS = sorted((DOCS / "snippets").glob("*.py"))


def name(path):
    return str(path.relative_to(ROOT))


class Block(NamedTuple):
    """A fenced block: its language, the lines inside, where they begin, the file it shows."""

    language: str
    lines: list[str]
    start: int
    file: str | None


def blocks(page):
    found, inside, lines = [], None, page.read_text().splitlines()
    for number, line in enumerate(lines):
        fence = re.match(r"\s*```(\w*)", line)
        if not fence:
            continue
        if inside is None:
            shown = re.fullmatch(r"<!-- file: (\S+) -->", lines[number - 1].strip())
            inside = (fence[1], number + 1, shown and shown[1])
        else:
            language, start, file = inside
            found.append(Block(language, lines[start:number], start, file))
            inside = None
    assert inside is None, f"{name(page)} leaves a block open"
    return found


def prose(page):
    """The page without its blocks."""
    text = page.read_text()
    return re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.MULTILINE | re.DOTALL)


# --- examples -----------------------------------------------------------------------------------


def execute(path, folder):
    return python([str(path)], folder)


def python(words, folder):
    env = {k: v for k, v in os.environ.items() if k != "SEMEL_URL"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def program(page):
    """The page's own Python, at the lines it has in the page, so that errors point there."""
    lines = [""] * len(page.read_text().splitlines())
    for block in blocks(page):
        if block.language == "python" and block.file is None:
            lines[block.start : block.start + len(block.lines)] = block.lines
    return "\n".join(lines)


def file_of(page):
    """A name that hides no module of Python's, as http.py would."""
    return f"page_{page.stem.replace('-', '_')}.py"


WITH_PROGRAM = [page for page in PAGES if program(page).strip()]


@pytest.mark.parametrize("page", WITH_PROGRAM, ids=name)
def test_the_examples_of_a_page_run_from_top_to_bottom(page, tmp_path):
    path = tmp_path / file_of(page)
    path.write_text(program(page))
    done = execute(path, tmp_path)
    assert done.returncode == 0, f"{name(page)}:\n{done.stderr}"


TUTORIAL = DOCS / "tutorial" / "a-payment-that-cannot-be-taken-twice.md"
KILLED = DOCS / "snippets" / "killed.py"


def console(page):
    """What is to be typed, and what the page says will come."""
    return [line for block in blocks(page) if block.language == "console" for line in block.lines]


def test_the_tutorial_can_be_followed_and_run_again(tmp_path):
    """As its reader does: the blocks in one file, nothing from elsewhere, run twice."""
    path = tmp_path / "shop.py"
    path.write_text(program(TUTORIAL))
    for _ in range(2):
        done = execute(path, tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "was used before with other arguments" in done.stdout
    words = shlex.split(console(TUTORIAL)[-1].removeprefix("$ semel "))
    assert "COMPLETED" in python(["-m", "semel", *words], tmp_path).stdout


def test_the_tutorials_killed_process_is_shown_whole_and_ends_as_told(tmp_path):
    [shown] = [block for block in blocks(TUTORIAL) if block.file]
    assert "\n".join(shown.lines) + "\n" == KILLED.read_text()
    first, second, third = (execute(KILLED, tmp_path) for _ in range(3))
    assert (first.returncode, first.stdout, first.stderr) == (9, "", "")
    assert (second.returncode, second.stderr) == (0, "")
    assert second.stdout == third.stdout
    assert second.stdout.splitlines() == [*console(TUTORIAL)[2:4], ""]


@pytest.mark.parametrize("snippet", [path for path in SNIPPETS if path != KILLED], ids=name)
def test_a_snippet_runs(snippet, tmp_path):
    done = execute(snippet, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.timeout(300)  # some forty programs, twice
@pytest.mark.parametrize("half", [0, 1], ids=["one half", "the other half"])
def test_all_pages_can_be_tried_in_one_folder_twice(tmp_path, half):
    """As a reader does who has one folder for all of it."""
    for page in WITH_PROGRAM:
        (tmp_path / file_of(page)).write_text(program(page))
    for snippet in SNIPPETS:
        if snippet != KILLED:
            (tmp_path / snippet.name).write_text(snippet.read_text())
    env = {k: v for k, v in os.environ.items() if k != "SEMEL_URL"}
    for path in sorted(tmp_path.glob("*.py"))[half::2] * 2:
        code, said = script(path, tmp_path, env)
        assert code == 0, f"{path.name}:\n{said}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_that_shows_parts_of_a_file_links_to_all_of_it(page):
    shown = {}
    for block in blocks(page):
        if block.file is not None:
            shown.setdefault(block.file, []).extend(block.lines)
    linked = {
        (page.parent / target).resolve() for target in re.findall(r"\]\(([^)\s#]+)\)", prose(page))
    }
    for file, lines in shown.items():
        assert (ROOT / file).read_text().splitlines() == lines or ROOT / file in linked


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_shows_its_snippets_as_they_are(page):
    for block in blocks(page):
        if block.file is not None:
            assert "\n".join(block.lines) in (ROOT / block.file).read_text(), block.file


def pasted():
    """Return each snippet as all its parts on a page, where the page shows its beginning."""
    for page in PAGES:
        shown = {}
        for block in blocks(page):
            if block.file in set(map(name, SNIPPETS)):
                shown.setdefault(ROOT / block.file, []).extend([*block.lines, "", ""])
        for snippet, lines in shown.items():
            if snippet.read_text().startswith(lines[0]):
                yield pytest.param("\n".join(lines), id=f"{name(page)}: {snippet.name}")


@pytest.mark.parametrize("text", list(pasted()))
def test_pasted_parts_of_snippet_define_every_name_they_use(text):
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "-q", "-"]
    found = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_every_snippet_is_shown():
    shown = {block.file for page in PAGES for block in blocks(page)}
    assert {name(snippet) for snippet in SNIPPETS} <= shown


def test_the_readme_example_charges_once(tmp_path):
    path = tmp_path / "readme.py"
    path.write_text(program(ROOT / "README.md"))
    receipt, bet = "{'order': 'o-7', 'paid': 40}\n", "Reply(version=1, reply={'bet': 40}"
    first, second = (execute(path, tmp_path).stdout for _ in range(2))
    assert first.startswith("charging 40\n" + 2 * receipt + bet)
    assert second.startswith(2 * receipt + bet)  # a new process remembers
    for said, cached in ((first, 1), (second, 2)):
        assert said.count("cached=True") == cached
        assert said.endswith("{'chips': {'ann': 60, 'bob': 100}, 'pot': 40}\n")


def test_readme_names_every_extra_that_exists_and_no_other():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    install = (ROOT / "README.md").read_text().partition("\n## Install\n")[2].partition("\n## ")[0]
    named = {name for group in re.findall(r"\.\[([\w,]+)\]", install) for name in group.split(",")}
    assert named == set(project["optional-dependencies"])


def commands():
    for page in PAGES:
        for block in blocks(page):
            if block.language in {"sh", "console"}:
                for line in (line.removeprefix("$ ") for line in block.lines):
                    if line.startswith("semel "):
                        yield pytest.param(line, id=f"{name(page)}: {line}")


@pytest.mark.parametrize("line", list(commands()))
def test_a_command_exists_with_its_options(line):
    words = shlex.split(line, comments=True)[1:]
    command = words[: 2 if words[0] in {"ledger", "db", "outbox", "parked"} else 1]
    helped = subprocess.run(
        [sys.executable, "-m", "semel", *command, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert helped.returncode == 0, helped.stderr
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in helped.stdout


# --- links --------------------------------------------------------------------------------------


def slug(heading):
    text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page):
    return {slug(h) for h in re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name(page)} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{name(page)} links to {target}"


@pytest.mark.parametrize("page", [p for p in PAGES if DOCS in p.parents], ids=name)
def test_a_page_can_be_reached_from_the_index(page):
    index = DOCS / "index.md"
    linked = {
        (DOCS / t.partition("#")[0]).resolve() for t in re.findall(r"\]\(([^)]+)\)", prose(index))
    }
    assert page == index or page in linked


# --- tables that must agree with the code -------------------------------------------------------


def rows(page, heading):
    """The cells of the first table below a heading, without its head."""
    body = re.split(rf"^#+ {re.escape(heading)}$", page.read_text(), flags=re.MULTILINE)[1]
    after = dropwhile(lambda line: not line.startswith("|"), body.splitlines())
    lines = takewhile(lambda line: line.startswith("|"), after)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines][2:]


@pytest.mark.parametrize(
    ("heading", "made_by"), [("Options", semel.idempotent), ("Options of once", semel.once)]
)
def test_every_option_is_described_with_its_default(heading, made_by):
    parameters = inspect.signature(made_by).parameters.values()
    expected = {
        p.name: ast.literal_eval(repr(p.default)) for p in parameters if p.kind is p.KEYWORD_ONLY
    }
    written = {
        row[0].strip("`"): ast.literal_eval(row[1].strip("`"))
        for row in rows(DOCS / "reference" / "guard.md", heading)
    }
    assert written == expected


def test_every_error_is_described():
    text = (DOCS / "reference" / "errors.md").read_text()
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, Exception):
            assert f"`{error.__name__}`" in text


def test_every_value_is_described():
    text = (DOCS / "reference" / "values.md").read_text()
    for value in set(values.__all__) - {"value"}:
        assert f"`{value}`" in text


def test_contributing_names_every_target():
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    told = (ROOT / "CONTRIBUTING.md").read_text()
    words = set(re.findall(r"\w+", told))
    assert not [name for name in targets[1].split() if name != "help" and name not in words]
    for name in re.findall(r"^    make (\w+)", told, re.MULTILINE):
        assert name in targets[1].split()


def test_the_key_limit_is_the_one_that_holds():
    assert f"1 to {LIMIT} bytes" in (DOCS / "reference" / "limits.md").read_text()


def test_glossary_is_in_order():
    text = (DOCS / "explanation" / "glossary.md").read_text()
    words = re.findall(r"^\*\*(.+?)\*\*", text, re.MULTILINE)
    assert words
    assert all(a.lower() < b.lower() for a, b in pairwise(words))


# --- the tests that a guarantee names -----------------------------------------------------------

NODE = re.compile(r"tests/[\w/]+\.py(?:::\w+)+")


def functions(tree):
    return {n.name for n in tree if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def classes(path):
    return {n.name: n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef)}


CONTRACT = {
    test
    for file in ("contracts", "log_appending", "log_keeping", "logs", "bells")
    for contract in classes(ROOT / f"src/semel/testing/{file}.py").values()
    for test in functions(contract.body)
}


@pytest.mark.parametrize("node", sorted(set(NODE.findall(GUARANTEES.read_text()))))
def test_a_named_test_exists(node):
    file, *inside = node.split("::")
    path = ROOT / file
    assert path.exists()
    if len(inside) == 1:
        assert inside[0] in functions(ast.parse(path.read_text()).body) | set(classes(path))
    else:
        assert inside[1] in functions(classes(path)[inside[0]].body) | CONTRACT


GAPS = [
    "The guard",
    "The stores",
    "The bound store",
    "The door for requests",
    "The door and your transaction",
    "The client",
    "The outbox and its relay",
    "The worker and its inbox",
    "Rooms",
    "The log, the bus and the gateway",
]


@pytest.mark.parametrize("heading", GAPS)
def test_every_gap_names_its_test(heading):
    found = rows(GUARANTEES, heading)
    assert found
    for row in found:
        assert NODE.search(row[-1]), row[0]
        assert "nearest" not in row[-1], "a gap has a test of its own"
