/**
 * Runs a follower through `clients/vectors/feed`; the README there says what the words mean.
 *
 * tests/support/feed_vectors.py is the same for the other client.
 */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

import { Follower, TERMS, parsed } from "../dist/rules.js";

const FOLDER = new URL("../../vectors/feed/", import.meta.url);

export function cases(name) {
  return JSON.parse(readFileSync(new URL(`${name}.json`, FOLDER), "utf8"));
}

export function bytesOf(step) {
  return step.hex === undefined ? Buffer.from(step.bytes) : Buffer.from(step.hex, "hex");
}

/** A cursor is written out, or its offset. */
export function cursorOf(place) {
  return typeof place === "number" ? `${place}.${String(place).padStart(12, "0")}` : place;
}

export function frame(event, data, place) {
  return Buffer.from(`event: ${event}\ndata: ${JSON.stringify(data)}\nid: ${cursorOf(place)}\n\n`);
}

export function hello({ at, head, retry }) {
  const first = retry === undefined ? "" : `retry: ${retry}\n`;
  return Buffer.concat([Buffer.from(first), frame("hello", { head: cursorOf(head) }, at)]);
}

/** An event as the vectors write it. */
export function shown(event) {
  const { id, position } = event;
  if (event.type === "reset") return { reset: { id, state: event.state, reason: event.reason } };
  const isUsual = id === cursorOf(position.offset) && event.data?.n === position.offset;
  return { update: isUsual ? position.offset : { id, data: event.data } };
}

/** A follower, a clock that stands still unless told, and what has been seen. */
export class Walk {
  now = 1_000_000;
  seen = [];
  step = null;

  constructor(options, chance) {
    const { after = null, last_seq = null, slow_ms = 0, silence_s, limit, ...rest } = options;
    assert.deepEqual(rest, {}, "unknown options");
    this.chance = chance;
    this.slowMs = slow_ms;
    const terms = { ...TERMS };
    if (silence_s !== undefined) terms.silenceMs = silence_s * 1000;
    if (limit !== undefined) terms.limit = limit;
    this.follower = new Follower(terms, () => chance, parsed(after), last_seq);
    this.advance();
  }

  /** Do all that can be done without the world. */
  advance() {
    for (;;) {
      const step = this.follower.next(this.now);
      if (step.step === "deliver") {
        this.seen.push(shown(step.event));
        this.now += this.slowMs;
        continue;
      }
      if (step.step === "read") this.since = this.now;
      else if (step !== this.step) this.seen.push(said(step));
      this.step = step;
      return;
    }
  }

  take(step) {
    const [[name, told]] = Object.entries(step);
    const act = this[`on_${name}`];
    assert(act, `an unknown step: ${name}`);
    if (act.call(this, told) !== "nothing") this.advance();
  }

  on_open(told) {
    const { status, type, retry_after_s, detail = "" } = told.status ? told : { status: told };
    if (this.step.step === "connect") this.now += this.step.afterMs;
    this.follower.opened(this.now, {
      status,
      mediaType: type ?? "text/event-stream",
      retryAfterMs: retry_after_s === undefined ? null : retry_after_s * 1000,
      detail,
    });
  }

  on_hello(told) {
    this.follower.received(hello(told));
  }

  on_entries(offsets) {
    for (const n of offsets) this.follower.received(frame("message", { n }, n));
  }

  on_end(offset) {
    this.follower.received(frame("end", { position: cursorOf(offset) }, offset));
  }

  on_bytes(bytes) {
    this.follower.received(bytesOf({ bytes }));
  }

  on_hex(hex) {
    this.follower.received(bytesOf({ hex }));
  }

  on_close() {
    this.follower.closed(this.now);
  }

  on_pass_ms(ms) {
    assert.equal(this.step.step, "read");
    this.now += ms;
    if (this.now - this.since < this.step.withinMs) return "nothing"; // somebody is still waiting
    this.follower.timedOut(this.now);
    return undefined;
  }

  on_time_up() {
    assert.equal(this.step.step, "connect");
    assert(this.step.withinMs > 0);
    this.follower.timedOut(this.now);
  }

  on_stop() {
    this.follower.stop();
  }

  on_cursor(place) {
    assert.equal(this.follower.cursor, cursorOf(place));
    return "nothing";
  }

  on_expect(wanted) {
    const seen = this.seen.splice(0);
    assert.deepEqual(
      seen,
      wanted.map((each) => this.meant(each)),
    );
    return "nothing";
  }

  meant(wanted) {
    if ("connect" in wanted) {
      const [least, most] = wanted.after_ms;
      return {
        last_seq: null,
        ...wanted,
        connect: cursorOf(wanted.connect),
        after_ms: Math.round(least + this.chance * (most - least)),
      };
    }
    return wanted.over ? { over: { detail: "", ...wanted.over } } : wanted;
  }
}

function said(step) {
  if (step.step === "over") {
    if (step.error === null) return { over: null };
    assert(step.error.message);
    return { over: { status: step.error.status, detail: step.error.detail } };
  }
  return {
    connect: step.cursor,
    after_ms: Math.round(step.afterMs),
    last_seq: step.lastSeq,
    why: step.why,
  };
}

/** Serves the frames of a case. */
export class Frameset {
  constructor(vector) {
    this.frames = vector.frames.map((text) => Buffer.from(text));
    this.ids = vector.frames.map((text) => /(?:^|[\r\n])id: ([^\r\n]*)/.exec(text)?.[1] ?? null);
  }

  /** The bytes behind this cursor. */
  answer(cursor) {
    if (cursor === null) return Buffer.concat(this.frames);
    const at = this.ids.indexOf(cursor);
    assert(at >= 0, `a cursor from nowhere: ${cursor}`);
    return Buffer.concat([this.frames[0], ...this.frames.slice(Math.max(at, 0) + 1)]);
  }
}
