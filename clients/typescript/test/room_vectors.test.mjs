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
