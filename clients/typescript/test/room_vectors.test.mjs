import assert from "node:assert/strict";
import test from "node:test";

import { PatchError, patched } from "../dist/patches.js";
import { Walk, roomCases } from "./room_vectors.mjs";

const FILES = ["versions", "snapshots", "requests", "optimistic", "clicks", "connection", "garbage"];

for (const file of FILES) {
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
