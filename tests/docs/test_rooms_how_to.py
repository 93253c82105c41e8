"""The how-tos about rooms, followed as they are written, in an empty folder."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from semel.client.room import room
from semel.observe import rules
from semel.rooms import Context, Refused
from support import binaries
from support.process import HOST, ServerProcess, free_port, new_folder, wait_until
from support.web import Python

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
SHARE, WATCH = HOW_TO / "share-a-room.md", HOW_TO / "watch-your-rooms.md"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def block(page, language, part):
    """The one that has this in it."""
    [found] = [block for block in blocks(page, language) if part in block]
    return found


def command(page, words, *, origin=False):
    """The line that begins so, to be typed after the prompt."""
    lines = "".join(blocks(page, "console")).splitlines()
    lines = [line for line in lines if line.startswith(f"$ {words}")]
    if words == "semel rooms":
        lines = [line for line in lines if "--trust" in line and ("--origin" in line) == origin]
    [line] = lines
    return shlex.split(line)[1:]


@dataclass
class Door(ServerProcess):
    """`semel rooms`, as a page starts it."""

    @property
    def url(self):
        return f"ws://{HOST}:{self.port}"

    def probe(self):
        assert httpx.get(f"http://{HOST}:{self.port}", timeout=5).status_code == 426


@pytest.fixture
def folder():
    made = new_folder("rooms")
    (made / "games.py").write_text("\n\n".join(blocks(SHARE, "python")))
    return made


@pytest.fixture
def opened(folder):
    doors = []

    def open_door(words, port=None):
        port = port or free_port()
        python = Python("rooms", Path(sys.executable), "venv", (("PYTHONPATH", str(folder)),))
        options = ["-m", *words, "--port", str(port)]
        options = [word.replace("sqlite:///", f"sqlite:///{folder}/") for word in options]
        doors.append(Door(python, options, port, folder).start())
        return doors[-1]

    yield open_door
    for door in doors:
        door.stop()


def run(folder, *words):
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=os.environ, stdout=subprocess.PIPE, text=True
    )


def test_the_rules_pass_the_test_that_is_shown(folder):
    (folder / "test_games.py").write_text(block(SHARE, "py", "def test_"))
    alone = ("-c", os.devnull, f"--rootdir={folder}", "-p", "no:cacheprovider")
    testing = run(folder, "-m", "pytest", "-q", *alone, "test_games.py")
    said, _ = testing.communicate(timeout=60)
    assert "1 passed" in said, said


def test_two_play_in_two_terminals_while_the_server_is_killed_and_comes_back(folder, opened):
    again = [run(folder, "games.py").communicate(timeout=30)[0] for _ in range(2)]
    assert again[0] == again[1] != ""
    words = command(SHARE, "semel rooms")
    door = opened(words)
    play = block(SHARE, "py", "sys.argv").replace(":8000", f":{door.port}")
    assert "asyncio.sleep(1)" in play  # time enough for a person
    play = play.replace("token=name", "token=name, timeout_s=60")  # for a loaded machine
    (folder / "play.py").write_text(play.replace("sleep(1)", "sleep(0.2)"))
    players = [run(folder, "-u", "play.py", name) for name in ("ann", "bob")]
    told = [[player.stdout.readline().strip() for _ in range(3)] for player in players]
    door.kill()
    opened(words, door.port)
    for player, lines in zip(players, told, strict=True):
        lines.extend(player.stdout.read().splitlines())
        player.stdout.close()
        assert player.wait(timeout=60) == 0
    for lines in told:
        *taken, last = lines
        assert last in {"ann has lost", "bob has lost"}
        assert len(taken) == 15
        assert {line.removeprefix("ann").removeprefix("bob") for line in taken} == {" takes 1"}


async def test_who_was_not_answered_in_time_asks_again_and_it_is_done_once(opened):
    words = command(SHARE, "semel rooms")
    named = {}
    exec(block(SHARE, "py", "import ActionTimeoutError"), named)
    door = await asyncio.to_thread(opened, words)
    async with room(door.url, table_id="m9", token="ann", timeout_s=0.5) as table:
        async for _ in table:
            break
        door.kill()
        asking = asyncio.ensure_future(named["act"](table, {"actionType": "sit"}))
        await asyncio.sleep(1.5)
        assert not asking.done()
        await asyncio.to_thread(opened, words, door.port)
        answer = await asking
        assert (answer.reply, answer.version) == ({"seat": 1}, 1)


def test_the_application_of_ones_own_can_be_imported(folder):
    (folder / "app.py").write_text(block(SHARE, "py", "RoomDoor("))
    importing = run(folder, "-c", "import app; print(app.app.router.routes[-1].path)")
    assert importing.communicate(timeout=30)[0] == "/rooms\n"


# --- the page -----------------------------------------------------------------------------------


@pytest.fixture
def page(folder, opened, typescript_client):
    """Where it is served as the how-to says, beside the rooms."""
    at = free_port()
    words = command(SHARE, "semel rooms", origin=True)
    door = opened([word.replace(":8310", f":{at}") for word in words])
    shutil.copytree(typescript_client, folder / "page" / "client")
    (folder / "page" / "index.html").write_text(
        block(SHARE, "html", "<!doctype html>").replace(":8000", f":{door.port}")
    )
    _, *words = [word.replace("8310", str(at)) for word in command(SHARE, "python -m http.server")]
    serving = run(folder, *words)
    try:
        wait_until(lambda: answers(at), "the page")
        yield f"http://{HOST}:{at}"
    finally:
        serving.kill()
        serving.communicate()


def answers(port):
    try:
        return httpx.get(f"http://{HOST}:{port}", timeout=5).is_success
    except httpx.HTTPError:
        return False


def test_the_page_is_played_in_by_two_and_says_what_was_refused(page, browser):
    tabs = {}
    first = browser.current_window_handle

    def see(name, id):
        browser.switch_to.window(tabs[name])
        return browser.execute_script(f"return document.getElementById('{id}').textContent")

    def take(name):
        browser.switch_to.window(tabs[name])
        browser.execute_script("document.getElementById('take').click()")

    try:
        for name in ("ann", "bob"):
            browser.switch_to.new_window("tab")
            tabs[name] = browser.current_window_handle
            browser.get(f"{page}/?name={name}")
            wait_until(lambda name=name: f'"{name}"' in see(name, "shown"), f"{name} to sit")
        take("ann")
        for name in tabs:
            wait_until(lambda name=name: '"left": 14' in see(name, "shown"), "the match")
        take("ann")
        wait_until(lambda: see("ann", "said").startswith("NOT_YOUR_TURN: wait"), "the refusal")
    finally:
        for tab in tabs.values():
            browser.switch_to.window(tab)
            browser.close()
        browser.switch_to.window(first)


# --- its numbers --------------------------------------------------------------------------------


def test_its_numbers_are_there_where_the_page_looks_for_them(opened):
    words, health = command(WATCH, "semel rooms"), free_port()
    opened([word.replace(":8701", f":{health}") for word in words])
    [block] = [block for block in blocks(WATCH, "console") if "curl" in block]
    said = httpx.get(f"http://{HOST}:{health}/metrics", timeout=5).text.splitlines()
    assert block.splitlines()[-1] in said


def test_prometheus_takes_the_settings_as_they_are_written(tmp_path):
    try:
        promtool = binaries.find("promtool")
    except binaries.Unavailable as absent:
        pytest.skip(str(absent))
    [settings] = blocks(WATCH, "yaml")
    (tmp_path / "prometheus.yml").write_text(settings)
    (tmp_path / "semel.yml").write_text(rules())
    done = subprocess.run(
        [promtool.path, "check", "config", "prometheus.yml"],
        cwd=tmp_path,
        env=promtool.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "9 rules found" in done.stdout


# --- what clients may send ----------------------------------------------------------------------

README = HOW_TO.parents[1] / "README.md"


def rules_of(page, name):
    """The class of rooms that a page shows, without what the page does with it."""
    tree = ast.parse(block(page, "python", f"class {name}(Room)"))
    tree.body = [
        each for each in tree.body if not isinstance(each, ast.Expr | ast.AsyncFunctionDef)
    ]
    names = {}
    exec(compile(tree, str(page), "exec"), names)
    return names[name]()


def context(user):
    return Context(room_id="r1", user=user, version=1, now_s=0.0, entropy=bytes(32))


@pytest.mark.parametrize("amount", [1.0, 40.0, True, "1", [1], None, {}, 0, -1, 101, 0.5])
def test_readme_pot_refuses_amount_that_is_no_whole_number_of_chips(amount):
    pot = rules_of(README, "Pot")
    bet = {"actionType": "bet", "amount": amount}
    assert isinstance(pot.apply(pot.begin("r1"), bet, context("ann")), Refused)


def test_readme_pot_takes_bets_until_the_chips_are_gone():
    pot = rules_of(README, "Pot")
    state = pot.begin("r1")
    for amount in (1, 40, 59):
        state = pot.apply(state, {"actionType": "bet", "amount": amount}, context("ann")).state
    assert state == {"chips": {"ann": 0, "bob": 100}, "pot": 100}
    assert isinstance(pot.apply(state, {"amount": 1}, context("ann")), Refused)
    assert isinstance(pot.apply(state, {"amount": 1}, context("eve")), Refused)


@pytest.mark.parametrize("number", [1.0, True, "1", [1], None, 0, 4])
def test_how_to_matches_refuse_number_that_is_not_one_two_or_three(number):
    matches = rules_of(SHARE, "Matches")
    state = matches.begin("r1")
    for user in ("ann", "bob"):
        state = matches.apply(state, {"actionType": "sit"}, context(user)).state
    take = {"actionType": "take", "number": number}
    assert isinstance(matches.apply(state, take, context("ann")), Refused)
