import assert from "node:assert/strict";
import test from "node:test";

import { Frames, TooLargeError } from "../dist/frames.js";
import { Follower, TERMS, parsed } from "../dist/rules.js";
import { Frameset, Walk, bytesOf, cases, cursorOf, frame, shown } from "./vectors.mjs";

const FEED = { status: 200, mediaType: "text/event-stream", retryAfterMs: null, detail: "" };

for (const file of ["answers", "backoff", "end", "garbage", "order", "silence"]) {
  for (const { name, options = {}, steps } of cases(file)) {
    test(`${file}: ${name}`, () => {
      for (const chance of [0, 1]) {
        const walk = new Walk(options, chance);
        for (const step of steps) walk.take(step);
        assert.deepEqual(walk.seen, [], "something happened that nobody expected");
      }
    });
  }
}

for (const vector of cases("frames")) {
  test(`frames: ${vector.name}`, () => {
    const raw = bytesOf(vector);
    for (const size of [1, 2, 3, 5, raw.length || 1]) {
      const { frames, got, tooLarge } = read(raw, size, vector.limit);
      assert.deepEqual(got, vector.frames);
      assert.equal(frames.retryMs, vector.retry ?? null);
      assert.equal(tooLarge, vector.too_large ?? false);
    }
  });
}

function read(raw, size, limit = 1 << 20) {
  const frames = new Frames(limit);
  const got = [];
  try {
    for (let at = 0; at < raw.length; at += size) {
      frames.feed(raw.subarray(at, at + size));
      for (let found = frames.next(); found !== null; found = frames.next()) {
        got.push([found.event, found.data, found.id]);
      }
    }
  } catch (error) {
    assert(error instanceof TooLargeError);
    return { frames, got, tooLarge: true };
  }
  return { frames, got, tooLarge: false };
}

for (const vector of cases("every_cut")) {
  const server = new Frameset(vector);
  const { length } = server.answer(null);

  test(`cut behind any byte: ${vector.name}`, () => {
    for (let cut = 0; cut <= length; cut++) {
      assert.deepEqual(followed(server, [cut]).delivered, vector.delivered, `cut behind ${cut}`);
    }
  });

  test(`cut again and again: ${vector.name}`, () => {
    for (let cut = 1; cut < length; cut += 3) {
      const cuts = [cut, Math.floor(cut / 2), cut + 7, 1, cut];
      assert.deepEqual(followed(server, cuts).delivered, vector.delivered, `cut behind ${cut}`);
    }
  });

  test(`in pieces of any size: ${vector.name}`, () => {
    for (let size = 1; size < 60; size++) {
      const { delivered, connections } = followed(server, [], size);
      assert.deepEqual(delivered, vector.delivered, `in pieces of ${size}`);
      assert.equal(connections, 1);
    }
  });
}

/** What is handed over when the connections are cut behind so many bytes. */
function followed(server, cuts, size = 1 << 20) {
  const follower = new Follower(TERMS, () => 0);
  const delivered = [];
  const left = [...cuts];
  let pieces = [];
  let connections = 0;
  for (;;) {
    const step = follower.next(0);
    if (step.step === "over") {
      assert.equal(step.error, null);
      return { delivered, connections };
    }
    if (step.step === "deliver") {
      delivered.push(shown(step.event));
    } else if (step.step === "connect") {
      connections += 1;
      const whole = server.answer(step.cursor);
      const raw = left.length > 0 ? whole.subarray(0, left.shift()) : whole;
      pieces = [];
      for (let at = 0; at < raw.length; at += size) pieces.push(raw.subarray(at, at + size));
      follower.opened(0, FEED);
    } else if (pieces.length > 0) {
      follower.received(pieces.shift());
    } else {
      follower.closed(0);
    }
  }
}

// --- what nobody wrote down ---------------------------------------------------------------------

const WORDS = ["data", "id", "event", "retry", ":", ": ", "\0", "é€😀", "{}", "reset", "end", "head"];
const BREAKS = ["\r", "\n", "\r\n", "\n\n", "\ufeff", "1.0123456789ab", "\x80", "7"];
const SCRAPS = [...WORDS, ...BREAKS].map((text) => Buffer.from(text, text === "\x80" ? "latin1" : "utf8"));

/** The same numbers each time: xorshift. */
function* numbers(seed) {
  for (let n = seed; ; ) {
    n ^= n << 13;
    n ^= n >>> 17;
    n ^= n << 5;
    yield n >>> 0;
  }
}

function noise(seed) {
  const random = numbers(seed);
  const pick = (most) => random.next().value % most;
  return Buffer.concat(Array.from({ length: pick(40) }, () => SCRAPS[pick(SCRAPS.length)]));
}

test("noise is the same frames in whatever pieces it comes, and moves no cursor but to a position", () => {
  for (let seed = 1; seed <= 500; seed++) {
    const raw = noise(seed);
    const whole = read(raw, raw.length || 1);
    const size = 1 + (seed % 9);
    assert.deepEqual(read(raw, size).got, whole.got, `seed ${seed}`);

    const follower = new Follower({ ...TERMS, limit: 200 }, () => 1, parsed(cursorOf(4)));
    follower.opened(0, FEED);
    for (let at = 0; at < raw.length; at += size) {
      follower.received(raw.subarray(at, at + size));
      let step = follower.next(0);
      while (step.step === "deliver") step = follower.next(0);
      assert(parsed(follower.cursor), `seed ${seed}`);
      if (step.step === "connect") follower.opened(0, FEED);
    }
  }
});

test("entries in any order are handed over in theirs", () => {
  for (let seed = 1; seed <= 200; seed++) {
    const random = numbers(seed);
    const follower = new Follower(TERMS, () => 0, parsed(cursorOf(0)));
    const got = [];
    for (let i = 0; i < 30; i++) {
      const n = 1 + (random.next().value % 9);
      follower.opened(0, FEED);
      follower.received(frame("message", { n }, n));
      for (let step = follower.next(0); step.step === "deliver"; step = follower.next(0)) {
        got.push(step.event.position.offset);
      }
    }
    assert.deepEqual(got, Array.from(got, (_, i) => i + 1));
  }
});
