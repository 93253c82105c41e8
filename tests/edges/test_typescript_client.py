"""The TypeScript client: it builds without a complaint, and does what the Python one does.

Its own tests are in clients/typescript/test: the vectors, and a server that cuts behind any byte.
"""

from __future__ import annotations

import json
import re
import subprocess

from support.typescript import DIST, FOLDER, environment

TESTS = (
    "test/vectors.test.mjs",
    "test/feed.test.mjs",
    "test/fetch.test.mjs",
    "test/room_vectors.test.mjs",
    "test/room.test.mjs",
)


def test_it_passes_its_own_tests(node, typescript_client):
    words = [node.path, "--test", "--test-reporter=tap", *TESTS]
    done = subprocess.run(
        words,
        cwd=FOLDER,
        env=environment(node),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    counted = dict(re.findall(r"^# (pass|fail|skipped|todo) (\d+)$", done.stdout, re.MULTILINE))
    wrong = re.findall(r"^\s*not ok.*", done.stdout, re.MULTILINE)
    assert (done.returncode, wrong) == (0, []), done.stdout[-5000:] + done.stderr
    assert int(counted["pass"]) > 100
    assert (counted["fail"], counted["skipped"], counted["todo"]) == ("0", "0", "0")


def test_its_tests_are_all_run():
    assert sorted(TESTS) == sorted(f"test/{path.name}" for path in FOLDER.glob("test/*.test.mjs"))


def test_it_needs_nothing_and_names_no_registry():
    package = json.loads((FOLDER / "package.json").read_text())
    assert "dependencies" not in package
    assert package["exports"]["."]["default"] == "./" + str((DIST / "index.js").relative_to(FOLDER))
    assert "://" not in (FOLDER / "package-lock.json").read_text()


def test_a_browser_can_load_it_as_it_is(typescript_client):
    """Modules name one another by their files, and nothing else that is loaded with them."""
    named = {
        name
        for path in typescript_client.glob("*.js")
        for name in re.findall(r'from "([^"]+)"', path.read_text())
    }
    assert named
    assert all((typescript_client / name).is_file() for name in named)
