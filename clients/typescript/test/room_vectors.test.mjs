import assert from "node:assert/strict";
import test from "node:test";

import { PatchError, patched } from "../dist/patches.js";
import { Walk, roomCases, roomFiles, update } from "./room_vectors.mjs";

for (const file of roomFiles().filter((name) => name !== "patches")) {
  for (const { name, options = {}, steps } of roomCases(file)) {
    test(`${file}: ${name}`, () => {
      for (const chance of [0, 1]) {
        const walk = new Walk(options, chance);
        for (const step of steps) walk.take(step);
        assert.deepEqual(walk.seen, [], "something happened that nobody expected");
      }
    });
  }
}

for (const { name, before, patch, after, refused = false } of roomCases("patches")) {
  test(`patches: ${name}`, () => {
    const was = JSON.stringify(before);
    if (refused) assert.throws(() => patched(before, patch), PatchError);
    else assert.deepEqual(patched(before, patch), after);
    assert.equal(JSON.stringify(before), was, "what it was made from stays as it is");
  });
}

const DEEP = `${"[".repeat(20_000)}${"]".repeat(20_000)}`;

for (const patch of [`[[[${DEEP}],1]]`, `[[[],1,${DEEP}]]`, `[${DEEP}]`, `[[["n"],1],${DEEP}]`]) {
  test(`a patch that nests too deeply does not fit, and throws nothing: ${patch.slice(0, 12)}`, () => {
    const walk = new Walk({ at: 5, state: { n: 5 } }, 0);
    const said = JSON.stringify(update({ from: 5, to: 6, patch: ["DEEP"] }));
    walk.take({ text: said.replace('["DEEP"]', patch) });
    const question = { currentVersion: 5, reason: "gap" };
    walk.take({ expect: [{ send: "REQUEST_SNAPSHOT", id: 2, ...question }] });
    walk.take({ snapshot: { version: 6, state: { n: 6 } }, id: 2 });
    walk.take({ expect: [{ state: { n: 6 }, version: 6 }] });
  });
}

// --- what is remembered ---------------------------------------------------------------------------

/** What was sent since the last look, of this type. */
function sent(walk, type) {
  return walk.seen.splice(0).filter(({ send }) => send === type);
}

/** Asked for, sent and answered; its id. */
function done(walk) {
  const id = walk.made + 1;
  walk.take({ act: { actionType: "a" }, request: id });
  walk.take({ result: { version: 5 }, id });
  return id;
}

test("of what is answered the last 256 numbers are remembered, and those of what is on its way", () => {
  const walk = new Walk({ at: 5, state: 5 }, 0);
  const first = done(walk);
  const second = done(walk);
  for (let n = 0; n < 255; n += 1) done(walk);
  sent(walk, "ACTION_REQUEST");
  const again = (id) => {
    walk.take({ act: { actionType: "a" }, request: id, request_id: id });
    const [{ seq }] = sent(walk, "ACTION_REQUEST");
    walk.take({ result: { version: 5, cached: true }, id });
    return seq;
  };
  assert.equal(again(second), 2);
  assert.equal(again(first), 258); // nobody remembers that it was 1
});

test("what is on its way keeps its number, however much is", () => {
  const walk = new Walk({ at: 5, state: 5 }, 0);
  for (let n = 0; n < 600; n += 1) {
    walk.take({ act: { actionType: "a", n }, request: walk.made + 1 });
  }
  walk.take({ close: 1006 });
  walk.take({ connect: null });
  walk.take({ joined: { head: 5, resumed: true } });
  const numbers = sent(walk, "ACTION_REQUEST").map(({ id, seq }) => [id, seq]);
  assert.deepEqual(numbers, [[2, 1], [2, 1]]);
  for (let id = 2; id < 602; id += 1) walk.take({ result: { version: 5 }, id });
  assert.deepEqual(sent(walk, "ACTION_REQUEST").map(({ seq }) => seq), Array.from({ length: 599 }, (_, n) => n + 2));
  walk.take({ act: { actionType: "a" }, request: 2, request_id: 2 });
  assert.equal(sent(walk, "ACTION_REQUEST")[0].seq, 1); // as it was, though others are forgotten now
});

test("of the results that were handed over the last 64 are known", () => {
  const walk = new Walk({ at: 5, state: 5 }, 0);
  const told = (version) => {
    walk.take({ hand_result: { version, result: version } });
    return walk.seen.splice(0).length;
  };
  for (let version = 6; version < 6 + 65; version += 1) assert.equal(told(version), 1);
  assert.equal(told(7), 0);
  assert.equal(told(6), 1);
});
