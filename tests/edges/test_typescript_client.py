"""The TypeScript client: it builds without a complaint, and does what the Python one does.

Its own tests are in clients/typescript/test: the vectors, and a server that cuts behind any byte.
"""

from __future__ import annotations

import functools
import json
import random
import re
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

from support import binaries
from support.process import HOST, wait_until
from support.room_walks import Wanderer
from support.typescript import DIST, FOLDER, MODULES, environment

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


def test_both_room_clients_do_the_same_whatever_happens(node, typescript_client):
    cases = [Wanderer(random.Random(seed)).case(40) for seed in range(400)]
    expected = [each for case in cases for step in case["steps"] for each in step.get("expect", ())]
    assert {name for each in expected for name in each} >= {"send", "state", "done", "refused"}
    said = run(node, FOLDER, node.path, "test/room_walks.mjs", given=json.dumps(cases))
    assert said.strip() == str(len(cases))


def test_its_tests_are_all_run():
    assert sorted(TESTS) == sorted(f"test/{path.name}" for path in FOLDER.glob("test/*.test.mjs"))


def test_it_needs_nothing_and_names_no_registry():
    package = json.loads((FOLDER / "package.json").read_text())
    assert "dependencies" not in package
    assert package["exports"]["."]["default"] == "./" + str((DIST / "index.js").relative_to(FOLDER))
    assert "://" not in (FOLDER / "package-lock.json").read_text()


def test_a_browser_can_load_it_as_it_is(typescript_client):
    """Modules name one another by their files, and nothing else that is loaded with them."""
    imports = re.compile(r'^(?:import|export|\}).* from "(.+)";$', re.MULTILINE)
    named = {
        name
        for path in typescript_client.glob("*.js")
        for name in imports.findall(path.read_text())
    }
    assert named
    assert all((typescript_client / name).is_file() for name in named)


# --- as a newcomer has it -----------------------------------------------------------------------

NAMES = (
    *("ActionError", "ActionTimeoutError", "Feed", "FeedError", "RoomError", "Table"),
    *("button", "feed", "idempotentFetch", "room"),
)

PAGE = """<!doctype html><script type="module">
import * as client from "./client/index.js";
window.names = Object.keys(client);
const table = client.room("/rooms", { tableId: "t" });
table.listen({ onStatus: (status) => { window.status = status; } });
table.close();
</script>"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_a_page_loads_it_by_a_script_that_is_a_module(browser, typescript_client, tmp_path):
    shutil.copytree(typescript_client, tmp_path / "client")
    (tmp_path / "index.html").write_text(PAGE)
    serve = functools.partial(Quiet, directory=tmp_path)
    with ThreadingHTTPServer((HOST, 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            browser.get(f"http://{HOST}:{server.server_port}/index.html")
            look = functools.partial(browser.execute_script, "return window.status")
            wait_until(lambda: look() == "closed", "the page to be done", within_s=20)
            assert sorted(browser.execute_script("return window.names")) == sorted(NAMES)
            browser.get("about:blank")
        finally:
            server.shutdown()


USE = """
import { ActionError, ActionTimeoutError, Table, button, room } from "semel-client";
import type { Action, ActionResult, Acting, Button, Presence, RoomEvent } from "semel-client";
import type { RoomListener, RoomOptions, RoomResult, RoomState, RoomStatus } from "semel-client";
import type { FeedEvent, FeedOptions, Patience, RoomTerms, RoomWorld, Token } from "semel-client";
import type { TurnedAway } from "semel-client";

interface Poker { turn: string; pot: number }

const options: RoomOptions<Poker> = {
  tableId: "t",
  token: async () => null,
  optimistic: (state: Poker, action: Action) => ({ ...state, pot: Number(action["amount"]) }),
};
const table: Table<Poker> = room<Poker>("wss://example.test/rooms", options);
table.listen({ onState: ({ state, version }: RoomState<Poker>) => [state.pot, version] });
const fold: Button = button(table, { enabledWhen: (state) => state.turn === "me" });

export async function raise(guard: string): Promise<ActionResult | null> {
  try {
    return await table.act({ actionType: "raise", amount: 1 }, { guard });
  } catch (error) {
    if (error instanceof ActionTimeoutError && error.wasSent) {
      return table.act({ actionType: "raise", amount: 1 }, { requestId: error.requestId });
    }
    if (error instanceof ActionError && fold.isEnabled) return null;
    throw error;
  }
}

// @ts-expect-error: an action has a type
void table.act({ amount: 1 });
// @ts-expect-error: there is no such thing in a state
table.listen({ onState: ({ state }) => state.pit });

export type All = [Acting, Presence, RoomEvent, RoomListener, RoomResult, RoomStatus, FeedEvent,
  FeedOptions, Patience, RoomTerms, RoomWorld, Token, TurnedAway];
"""


def test_a_project_that_installs_the_folder_has_it_and_its_types(node, typescript_client, tmp_path):
    (tmp_path / "package.json").write_text('{"type": "module", "private": true}')
    (tmp_path / "use.ts").write_text(USE)
    install = [*binaries.npm(node), "install", "--offline", "--no-audit", "--no-fund"]
    run(node, tmp_path, *install, FOLDER)
    said = run(
        *(node, tmp_path, node.path, "--input-type=module", "-e"),
        'import * as client from "semel-client"; console.log(Object.keys(client).join(" "));',
    )
    assert sorted(said.split()) == sorted(NAMES)
    for module, resolution in (("nodenext", "nodenext"), ("esnext", "bundler")):
        how = ["--module", module, "--moduleResolution", resolution]
        check_types(node, tmp_path, *how, "--exactOptionalPropertyTypes", "use.ts")


# What the examples of the docs take for granted.
AROUND = """
declare const feed: typeof import("semel-client").feed;
declare const room: typeof import("semel-client").room;
declare const [url, job, me]: string[];
declare const order: object;
declare const session: { token(): string };
declare const foldElement: { onclick: unknown };
declare function guess(state: { turn: string }, action: object): { turn: string };
declare function light(status: string, why?: string): void;
declare function done(): void;
declare function show(data: unknown): void;
declare function startAgainFrom(state: unknown): void;
declare function draw(state: unknown): void;
declare function tell(what: unknown): void;
declare function celebrate(result: unknown): void;
declare module "ws" {
  export const WebSocket: import("semel-client").SocketClass;
}
"""

WRITTEN = (FOLDER / "README.md", FOLDER.parents[1] / "docs" / "reference" / "room-client.md")


def test_what_the_docs_show_compiles_under_strict(node, typescript_client, tmp_path):
    blocks = [
        block
        for path in WRITTEN
        for block in re.findall(r"^```ts\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    ]
    assert len(blocks) >= 6
    (tmp_path / "around.d.ts").write_text(AROUND)
    names = [f"block_{n}.ts" for n in range(len(blocks))]
    for name, block in zip(names, blocks, strict=True):
        (tmp_path / name).write_text(block)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "semel-client").symlink_to(FOLDER)
    how = ["--module", "nodenext", "--moduleDetection", "force"]
    check_types(node, tmp_path, *how, "around.d.ts", *names)


def check_types(node, folder, *words):
    tsc = MODULES / "typescript" / "bin" / "tsc"
    run(node, folder, node.path, tsc, "--noEmit", "--strict", "--target", "es2022", *words)


def run(node, folder, *words, given=None):
    done = subprocess.run(
        words,
        input=given,
        cwd=folder,
        env=environment(node),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
