"""The how-tos about rooms, followed as they are written, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from semel.observe import rules
from support import binaries
from support.process import HOST, ServerProcess, free_port, new_folder
from support.web import Python

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
SHARE, WATCH = HOW_TO / "share-a-room.md", HOW_TO / "watch-your-rooms.md"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def command(page, words):
    """The line that begins so, to be typed after the prompt."""
    lines = "".join(blocks(page, "console")).splitlines()
    [line] = [line for line in lines if line.startswith(f"$ {words}") and "--trust" in line]
    return shlex.split(line)[1:]


@dataclass
class Door(ServerProcess):
    """`semel rooms`, as a page starts it."""

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

    def open_door(words):
        port = free_port()
        python = Python("rooms", Path(sys.executable), "venv", (("PYTHONPATH", str(folder)),))
        options = ["-m", *words, "--port", str(port)]
        options = [word.replace("sqlite:///", f"sqlite:///{folder}/") for word in options]
        doors.append(Door(python, options, port, folder).start())
        return port

    yield open_door
    for door in doors:
        door.stop()


def run(folder, *words):
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=os.environ, stdout=subprocess.PIPE, text=True
    )


def test_two_play_in_two_terminals_through_the_door_that_was_opened(folder, opened):
    again = [run(folder, "games.py").communicate(timeout=30)[0] for _ in range(2)]
    assert again[0] == again[1] != ""
    port = opened(command(SHARE, "semel rooms"))
    [play] = [block for block in blocks(SHARE, "text") if "sys.argv" in block]
    (folder / "play.py").write_text(play.replace(":8000", f":{port}"))
    players = [run(folder, "play.py", name) for name in ("ann", "bob")]
    told = [player.communicate(timeout=30)[0].splitlines() for player in players]
    assert [player.returncode for player in players] == [0, 0]
    for lines in told:
        assert lines[-1] in {"ann has lost", "bob has lost"}
        assert len(lines) > 1


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
