import assert from "node:assert/strict";
import test from "node:test";

import { FeedError, feed } from "../dist/index.js";
import { CHUNKED, PLAIN, answers, dribbles, holds, sends, serve, serves } from "./server.mjs";
import { Frameset, cases, cursorOf, frame, hello, shown } from "./vectors.mjs";

const ENTRIES = [1, 2, 3].map((n) => frame("message", { n }, n));
const END = frame("end", { position: cursorOf(3) }, 3);
const WHOLE = [PLAIN, hello({ at: 0, head: 3 }), ...ENTRIES, END];
const ALL = [{ update: 1 }, { update: 2 }, { update: 3 }];

/** Time that passes when somebody sleeps, and no other; chance is a half. */
function metronome() {
  const slept = [];
  return {
    slept,
    now: () => slept.reduce((sum, ms) => sum + ms, 0),
    chance: () => 0.5,
    sleep: async (ms) => void slept.push(ms),
  };
}

async function all(events) {
  const got = [];
  for await (const event of events) got.push(shown(event));
  return got;
}

/** A test with a server that plays these parts, and is closed whatever happens. */
function serving(name, parts, body) {
  test(name, { timeout: 20_000 }, async () => {
    const server = await serve(...parts);
    try {
      await body(server, metronome());
    } finally {
      await server.close();
    }
  });
}

// --- cuts ---------------------------------------------------------------------------------------

for (const [name, framing, stride] of [["plain", PLAIN, 1], ["chunked", CHUNKED, 5]]) {
  const vector = cases("every_cut")[1];
  const frameset = new Frameset(vector);
  const cuts = [];
  const part = serves((cursor) => frameset.answer(cursor), cuts, framing);

  serving(`a feed that is cut behind any byte is handed over whole (${name})`, [part], async (server) => {
    const length = framing.length + frameset.answer(null).length + 30;
    for (let cut = 0; cut < length; cut += stride) {
      cuts.push(cut);
      const got = await all(feed(server.url, { world: metronome() }));
      assert.deepEqual(got, vector.delivered, `cut behind ${cut}`);
    }
  });
}

serving("a feed that comes one byte at a time is handed over whole", [dribbles(...WHOLE)], async (server, world) => {
  assert.deepEqual(await all(feed(server.url, { world })), ALL);
  assert.deepEqual(world.slept, []);
});

serving(
  "a hole is asked for at once",
  [sends(PLAIN, ENTRIES[0], ENTRIES[2], END), sends(PLAIN, ENTRIES[1], ENTRIES[2], END)],
  async (server, world) => {
    assert.deepEqual(await all(feed(server.url, { world })), ALL);
    assert.deepEqual(server.cursors, [null, cursorOf(1)]);
    assert.deepEqual(world.slept, []);
  },
);

serving("the cursor is behind what was handed over", [sends(...WHOLE)], async (server, world) => {
  const events = feed(server.url, { world });
  assert.equal(events.cursor, null);
  const { value } = await events.next();
  assert.deepEqual([value.id, events.cursor], [cursorOf(1), cursorOf(1)]);
  events.close();
  const rest = await all(feed(server.url, { after: value.id, world }));
  assert.deepEqual(rest, [{ update: 2 }, { update: 3 }]);
});

// --- silence ------------------------------------------------------------------------------------

const SILENT = {
  "no answer": [],
  "half a head": [PLAIN.subarray(0, 40)],
  "no event": [PLAIN, hello({ at: 0, head: 0 })],
  "half an event": [PLAIN, hello({ at: 0, head: 3 }), Buffer.from("data: ")],
};
for (const [name, pieces] of Object.entries(SILENT)) {
  serving(`a server that falls silent is left (${name})`, [holds(...pieces), sends(...WHOLE)], async (server, world) => {
    assert.deepEqual(await all(feed(server.url, { silenceMs: 150, world })), ALL);
    assert(world.slept.length >= 1); // a busy machine may fall silent, too
    await server.empty();
  });
}

serving(
  "an event that the server forgot is asked for",
  [holds(PLAIN, hello({ at: 0, head: 3 }), ENTRIES[0]), sends(...WHOLE)],
  async (server, world) => {
    assert.deepEqual(await all(feed(server.url, { graceMs: 150, world })), ALL);
    assert.deepEqual(server.cursors.slice(0, 2), [null, cursorOf(1)]);
  },
);

// --- answers ------------------------------------------------------------------------------------

serving(
  "a server that says when is asked then",
  [answers(503, "", { "Retry-After": "7" }), answers(500), sends(...WHOLE)],
  async (server, world) => {
    assert.deepEqual(await all(feed(server.url, { world })), ALL);
    assert.deepEqual(world.slept, [7500, 750]);
  },
);

const LATER = { Date: "Sun, 06 Nov 1994 08:49:37 GMT", "Retry-After": "Sun, 06 Nov 1994 08:49:57 GMT" };
serving(
  "a server that says when as a date is asked then, by its own clock",
  [answers(429, "", LATER), sends(...WHOLE)],
  async (server, world) => {
    assert.deepEqual(await all(feed(server.url, { world })), ALL);
    assert.deepEqual(world.slept, [20_500]);
  },
);

serving("a feed that has ended is over", [answers(204)], async (server, world) => {
  assert.deepEqual(await all(feed(server.url, { after: cursorOf(3), world })), []);
  assert.equal(server.asked.length, 1);
});

for (const status of [401, 403, 404, 410]) {
  serving(`${status} is an error that says why`, [answers(status, { detail: "Why." })], async (server, world) => {
    const events = feed(server.url, { world });
    await assert.rejects(all(events), (error) => {
      assert(error instanceof FeedError);
      assert.deepEqual([error.status, error.detail], [status, "Why."]);
      assert.match(error.message, /Why/);
      return true;
    });
    assert.equal(events.status, "failed");
    assert.deepEqual(await events.next(), { done: true, value: undefined });
    assert.equal(server.asked.length, 1);
  });
}

serving("a page is no feed", [answers(200, "x".repeat(200_000), { type: "text/html" })], async (server, world) => {
  await assert.rejects(all(feed(server.url, { world })), /text\/html/);
});

test("nobody there is waited for, with growing pauses", { timeout: 20_000 }, async () => {
  const world = metronome();
  const server = await serve(sends(...WHOLE));
  const { port } = server.listener.address();
  await server.close();
  const late = await serve(sends(...WHOLE));
  const asked = (url, init) => fetch(world.slept.length < 3 ? `http://127.0.0.1:${port}/` : url, init);
  assert.deepEqual(await all(feed(late.url, { world, fetch: asked })), ALL);
  assert.deepEqual(world.slept, [750, 1250, 2250]);
  await late.close();
});

// --- what cannot be asked -----------------------------------------------------------------------

const HOPELESS = {
  "headers that cannot be had": [{ headers: async () => Promise.reject(new Error("logged out")) }, /logged out/],
  "a function of headers that throws": [{ headers: () => assert.fail("a mistake") }, /a mistake/],
  "a name that no header has": [{ headers: { "no name": "x" } }, /no name/i],
  "a value that no header has": [{ headers: { "X-Name": "\u20ac" } }, /./],
  "credentials that fetch does not know": [{ credentials: "all" }, /all/],
  "a password in the address": [{ at: (url) => url.replace("//", "//me:secret@") }, /credentials|password/i],
  "a scheme that nobody speaks": [{ at: () => "gopher://example.test/job" }, /gopher/],
};
for (const [name, [{ at = (url) => url, ...options }, words]] of Object.entries(HOPELESS)) {
  serving(`${name}: told at once, and not tried again`, [sends(...WHOLE)], async (server, world) => {
    const told = (error) => {
      assert(error instanceof FeedError);
      assert.match(error.message, words);
      assert.doesNotMatch(error.message, /secret/);
      assert(error.cause !== undefined || options.headers === undefined);
      return true;
    };
    const events = feed(at(server.url), { ...options, world });
    await assert.rejects(all(events), told);
    assert.equal(events.status, "failed");
    assert.deepEqual(await events.next(), { done: true, value: undefined });

    const seen = [];
    const onStatus = (status) => seen.push(status);
    const error = await new Promise((resolve) => {
      feed(at(server.url), { ...options, world }).listen({ onError: resolve, onStatus });
    });
    assert(told(error));
    assert.deepEqual(seen, ["connecting", "failed"]);
    assert.deepEqual([server.asked.length, world.slept], [0, []]);
  });
}

serving("headers that do not come are not waited for", [sends(...WHOLE)], async (server, world) => {
  let asked = 0;
  const headers = () => (++asked === 1 ? new Promise(() => undefined) : {});
  assert.deepEqual(await all(feed(server.url, { headers, silenceMs: 150, world })), ALL);
  assert(asked >= 2);
});

serving("a password in an address is kept out of an error of the state", [answers(204)], async (server) => {
  const events = feed(server.url.replace("//", "//me:secret@"));
  await assert.rejects(events.state(), (error) => error instanceof FeedError && !/secret/.test(error.message));
  await assert.rejects(feed(server.url, { headers: () => assert.fail("mine") }).state(), FeedError);
});

// --- what is asked ------------------------------------------------------------------------------

serving(
  "a request says what is wanted",
  [sends(PLAIN, hello({ at: 0, head: 3 }), ENTRIES[0]), sends(...WHOLE)],
  async (server, world) => {
    let tokens = 0;
    const headers = async () => ({ Authorization: `Bearer ${++tokens}` });
    await all(feed(`${server.url}?tenant=a%20b`, { lastSeq: 21, headers, world }));
    const [first, second] = server.asked;
    assert.equal(first.target, "/feeds/job-1?tenant=a%20b&last_seq=21");
    assert.equal(second.target, first.target);
    assert.deepEqual(server.cursors, [null, cursorOf(1)]);
    assert.equal(first.headers.get("accept"), "text/event-stream");
    assert.equal(second.headers.get("authorization"), "Bearer 2");
  },
);

serving(
  "the state is asked for beside the feed",
  [answers(200, { position: cursorOf(3) }, { type: "application/json" }), answers(403, { title: "No." })],
  async (server) => {
    const events = feed(server.url, { headers: { "X-Token": "x" } });
    assert.deepEqual(await events.state(), { position: cursorOf(3) });
    assert.equal(server.asked[0].headers.get("accept"), "application/json");
    assert.equal(server.asked[0].headers.get("x-token"), "x");
    await assert.rejects(events.state(), (error) => error.status === 403 && /No\./.test(error.message));
  },
);

test("what cannot work is refused", () => {
  const refused = (options, words) => assert.throws(() => feed("http://x.test/", options), words);
  refused({ after: "7" }, /no cursor/);
  refused({ after: "9007199254740993.aaaaaaaaaaaa" }, /no cursor/);
  refused({ after: cursorOf(3), lastSeq: 7 }, /either after or lastSeq/);
  refused({ silenceMs: 0 }, /silenceMs/);
  refused({ graceMs: Number.NaN }, /graceMs/);
  assert.throws(() => feed("/only/a/path"), /URL/);
});

// --- ending early -------------------------------------------------------------------------------

serving("leaving the loop hangs up", [holds(PLAIN, hello({ at: 0, head: 3 }), ENTRIES[0])], async (server) => {
  const events = feed(server.url);
  for await (const event of events) {
    assert.deepEqual(shown(event), { update: 1 });
    break;
  }
  assert.equal(events.status, "closed");
  await server.empty();
});

const WAITS = {
  "for an answer": holds(),
  "for an event": holds(PLAIN, hello({ at: 0, head: 0 })),
  "to connect again": answers(503, "", { "Retry-After": "60" }),
};
for (const [name, part] of Object.entries(WAITS)) {
  serving(`closing ends a loop that waits ${name}`, [part], async (server) => {
    const events = feed(server.url);
    const ended = all(events);
    while (server.asked.length === 0) await new Promise(setImmediate);
    await new Promise((resolve) => setTimeout(resolve, 20)); // so that it waits, mostly
    events.close();
    assert.deepEqual(await ended, []);
    await server.empty();
  });
}

serving("an aborted signal ends the loop", [holds(PLAIN, hello({ at: 0, head: 0 }))], async (server) => {
  const controller = new AbortController();
  const ended = all(feed(server.url, { signal: controller.signal }));
  while (server.asked.length === 0) await new Promise(setImmediate);
  controller.abort();
  assert.deepEqual(await ended, []);
  await server.empty();
  assert.deepEqual(await all(feed(server.url, { signal: controller.signal })), []);
});

test("a fetch that does not listen to its signal is not waited for", { timeout: 5_000 }, async () => {
  const deaf = () => new Promise(() => undefined);
  const events = feed("http://x.test/", { fetch: deaf, silenceMs: 20 });
  const ended = all(events);
  await new Promise((resolve) => setTimeout(resolve, 50));
  events.close();
  assert.deepEqual(await ended, []);
});

test("an answer that comes after it was given up is hung up on", { timeout: 5_000 }, async () => {
  const hungUp = new Promise((resolve) => {
    const body = new ReadableStream({ cancel: resolve });
    const answer = new Response(body, { headers: { "Content-Type": "text/event-stream" } });
    const late = () => new Promise((given) => setTimeout(() => given(answer), 50));
    const events = feed("http://x.test/", { fetch: late });
    void all(events);
    setTimeout(() => events.close(), 10);
  });
  await hungUp;
});

serving("two loops over one feed are refused", [holds(PLAIN)], async (server) => {
  const events = feed(server.url);
  const first = events.next();
  await assert.rejects(events.next(), /in a loop already/);
  events.close();
  assert.deepEqual(await first, { done: true, value: undefined });
});

// --- listening ----------------------------------------------------------------------------------

const RESET = frame("reset", { reason: "trimmed", position: cursorOf(2), state: { n: 2 } }, 2);

serving(
  "listeners are called for what comes, and told how it stands",
  [sends(PLAIN, ENTRIES[0]), sends(PLAIN, RESET, ENTRIES[2], END)],
  async (server, world) => {
    const seen = [];
    await new Promise((resolve) => {
      feed(server.url, { world }).listen({
        onUpdate: (update) => seen.push(shown(update)),
        onReset: (reset) => seen.push(shown(reset)),
        onStatus: (status) => seen.push(status),
        onEnd: resolve,
      });
    });
    assert.deepEqual(seen, [
      "connecting",
      "open",
      { update: 1 },
      "waiting",
      "connecting",
      "open",
      { reset: { id: cursorOf(2), state: { n: 2 }, reason: "trimmed" } },
      { update: 3 },
      "ended",
    ]);
  },
);

serving("a listener that throws ends the feed and is told", [holds(...WHOLE.slice(0, 4))], async (server) => {
  const error = await new Promise((resolve) => {
    const onUpdate = () => {
      throw new Error("mine");
    };
    feed(server.url).listen({ onUpdate, onError: resolve, onEnd: () => assert.fail() });
  });
  assert.equal(error.message, "mine");
  await server.empty();
});

for (const [bad, part] of [
  ["open", holds(...WHOLE.slice(0, 2))],
  ["waiting", answers(503, "", { "Retry-After": "60" })],
]) {
  serving(`a listener that throws at "${bad}" leaves nothing behind`, [part], async (server) => {
    const onStatus = (status) => {
      if (status !== "connecting") throw new Error(status);
    };
    const events = feed(server.url);
    const error = await new Promise((resolve) => events.listen({ onStatus, onError: resolve }));
    assert.equal(error.message, bad);
    assert.equal(events.status, "failed");
    assert.deepEqual(await events.next(), { done: true, value: undefined });
    await server.empty();
  });
}

serving("a listener of a feed that is closed is not told of an end", [holds(PLAIN)], async (server) => {
  const seen = [];
  const onEnd = () => assert.fail("it has not ended");
  const events = feed(server.url).listen({ onStatus: (status) => seen.push(status), onEnd });
  while (server.asked.length === 0) await new Promise(setImmediate);
  events.close();
  await server.empty();
  assert.equal(seen.at(-1), "closed");
});
