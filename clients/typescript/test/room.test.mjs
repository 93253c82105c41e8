import assert from "node:assert/strict";
import test from "node:test";

import { ActionError, ActionTimeoutError, RoomError, button, room } from "../dist/index.js";
import { play } from "./room_server.mjs";
import { add, handResult, heartbeat, result, snapshot, update } from "./room_vectors.mjs";

// A hundredth of what people wait for.
const QUICK = {
  timeoutMs: 2_000,
  resyncMs: 200,
  graceMs: 100,
  connectMs: 1_000,
  heartbeatMs: 1_000,
  backoffMs: 20,
  longestMs: 100,
};

const ACTION = { actionType: "raise", amount: 100 };

/** A test with a server that plays these parts, and a table that is left whatever happens. */
function playing(name, parts, options, body) {
  test(name, { timeout: 20_000 }, async () => {
    const server = play(...parts);
    const table = room("ws://example.test/rooms", {
      tableId: "t",
      terms: QUICK,
      WebSocket: server.WebSocket,
      ...options,
    });
    try {
      await body(table, server);
    } finally {
      table.close();
    }
    await new Promise(setImmediate);
    assert.deepEqual(server.errors, []);
    assert(server.seats.every(({ isClosed }) => isClosed));
  });
}

/** All news, and a way to wait for some. */
function hearing(table) {
  const got = [];
  const waiting = [];
  const take = (type) => (news) => {
    got.push([type, news]);
    for (const each of waiting.splice(0)) each();
  };
  table.listen({
    onState: take("state"),
    onEvent: take("event"),
    onResult: take("result"),
    onPresence: take("presence"),
    onStatus: take("status"),
    onTrouble: take("trouble"),
    onError: take("error"),
  });
  const until = async (isThere) => {
    while (!got.some(isThere)) await new Promise((resolve) => waiting.push(resolve));
    return got;
  };
  const at = (version) => until(([type, news]) => type === "state" && news.version === version);
  return { got, until, at };
}

async function stays(seat) {
  await seat.show(5, 5);
  await seat.stay();
}

// --- seeing -------------------------------------------------------------------------------------

playing(
  "a table is seen from its snapshot on, and its events once",
  [
    async (seat) => {
      const join = await seat.show(5, { n: 5 }, { viewer: "ann" });
      assert.deepEqual(join.payload, { tableId: "t", token: "secret", spectate: true });
      const six = update({ from: 5, to: 6, patch: [[["n"], 6]], events: ["six"] });
      await seat.say(six);
      await seat.say(six);
      await seat.say({ type: "PRESENCE", payload: { tableId: "t", users: ["ann"], spectators: 1 } });
      await seat.say(handResult({ version: 6, result: "won" }));
      await seat.say({ type: "ERROR", payload: { code: "INVALID", message: "?" } });
      await seat.say(update({ from: 6, to: 7, patch: [[["n"], 7]] }));
      await seat.stay();
    },
  ],
  { token: "secret", spectate: true },
  async (table, server) => {
    assert.deepEqual([table.status, table.state, table.version], ["connecting", null, null]);
    const { at } = hearing(table);
    const state = (n) => ({ state: { n }, confirmed: { n }, version: n, viewer: "ann", pending: 0 });
    assert.deepEqual(await at(7), [
      ["status", "connecting"],
      ["status", "open"],
      ["state", state(5)],
      ["state", state(6)],
      ["event", { version: 6, data: "six" }],
      ["presence", { users: ["ann"], spectators: 1 }],
      ["result", { version: 6, result: "won" }],
      ["trouble", { code: "INVALID", message: "?" }],
      ["state", state(7)],
    ]);
    assert.deepEqual([table.state, table.confirmed], [{ n: 7 }, { n: 7 }]);
    assert.deepEqual([table.cursor, table.viewer, table.status], ["7.000000000007", "ann", "open"]);
    assert.deepEqual(server.urls, ["ws://example.test/rooms"]);
    const later = hearing(table);
    assert.deepEqual(later.got, [["status", "open"], ["state", state(7)]]);
  },
);

playing("a listener that throws disturbs nobody", [stays], {}, async (table) => {
  const thrown = [];
  const before = process.listeners("uncaughtException");
  process.removeAllListeners("uncaughtException");
  process.on("uncaughtException", (error) => thrown.push(error.message));
  table.listen({
    onState: () => {
      throw new Error("mine");
    },
  });
  await hearing(table).at(5);
  await new Promise(setImmediate);
  process.removeAllListeners("uncaughtException");
  for (const listener of before) process.on("uncaughtException", listener);
  assert.deepEqual(thrown, ["mine"]);
});

// --- cuts, silence, and what is missing ---------------------------------------------------------

playing(
  "a hole is filled by one snapshot, and what came meanwhile",
  [
    async (seat) => {
      await seat.show(5, 5);
      for (const n of [8, 9]) await seat.say(update({ from: n - 1, to: n, patch: [[[], n]], events: [n] }));
      const asked = await seat.hear("REQUEST_SNAPSHOT");
      assert.deepEqual(asked.payload, { tableId: "t", currentVersion: 5, reason: "gap" });
      await seat.say(snapshot({ version: 8, state: 8, reason: "gap" }), asked.requestId);
      assert.deepEqual(await seat.stay(), []);
    },
  ],
  {},
  async (table) => {
    const got = await hearing(table).at(9);
    await new Promise(setImmediate);
    assert.deepEqual(
      got.filter(([type]) => type === "event"),
      [["event", { version: 9, data: 9 }]],
    );
  },
);

playing(
  "a question that is lost is asked again",
  [
    async (seat) => {
      await seat.show(5, 5);
      await seat.say(heartbeat(6));
      await seat.hear("REQUEST_SNAPSHOT");
      const { requestId } = await seat.hear("REQUEST_SNAPSHOT");
      await seat.say(snapshot({ version: 6, state: 6 }), requestId);
      await seat.stay();
    },
  ],
  {},
  async (table) => {
    await hearing(table).at(6);
  },
);

playing(
  "a server that falls silent is left, and come back to with the cursor",
  [
    async (seat) => {
      await seat.letIn({ head: 5, heartbeat_ms: 100 });
      await seat.say(snapshot({ version: 5, state: 5 }));
      await seat.stay();
    },
    async (seat) => {
      const join = await seat.letIn({ resumed: true, head: 6 });
      assert.equal(join.payload.cursor, "5.000000000005");
      await seat.say(update({ from: 5, to: 6, patch: [[[], 6]] }));
      await seat.stay();
    },
  ],
  {},
  async (table, server) => {
    const got = await hearing(table).at(6);
    const statuses = got.filter(([type]) => type === "status").map(([, status]) => status);
    assert.deepEqual(statuses, ["connecting", "open", "waiting", "connecting", "open"]);
    assert.equal(server.seats[0].closedWith, 1000);
  },
);

for (const code of [1000, 1001, 1006, 1008, 1009, 1013]) {
  const closes = async (seat) => {
    await seat.show(5, 5);
    await seat.close(code);
  };
  const second = async (seat) => {
    await seat.show(6, 6);
    await seat.stay();
  };
  playing(`closed with ${code}, it is opened again`, [closes, second], {}, async (table) => {
    await hearing(table).at(6);
  });
}

// --- tokens -------------------------------------------------------------------------------------

async function refuses(seat) {
  const { requestId } = await seat.hear("JOIN");
  await seat.say({ type: "ERROR", payload: { code: "UNAUTHORIZED", message: "who?" } }, requestId);
  await seat.stay();
}

playing("a token that is refused ends it for everybody", [refuses], { token: "old" }, async (table) => {
  const answer = assert.rejects(table.act(ACTION), { name: "RoomError", code: "UNAUTHORIZED" });
  const { got, until } = hearing(table);
  await until(([type]) => type === "error");
  await answer;
  assert.deepEqual(got.at(-2), ["status", "failed"]);
  await assert.rejects(table.act(ACTION), RoomError);
  assert.equal(hearing(table).got.at(-1)[1].message, "UNAUTHORIZED: who?");
  assert.deepEqual(table.turnedAway, { code: "UNAUTHORIZED", message: "who?" });
});

playing(
  "who is turned away is told why, and so is who listens later, until they are in",
  [
    async (seat) => {
      const { requestId } = await seat.hear("JOIN");
      const payload = { code: "RATE_LIMITED", message: "slower", retry: true, retryAfterMs: 50 };
      await seat.say({ type: "ERROR", payload }, requestId);
      await seat.stay();
    },
    stays,
  ],
  {},
  async (table) => {
    const told = [];
    const onStatus = (status, why) => told.push([status, why]);
    table.listen({ onStatus });
    const { until, at } = hearing(table);
    assert.equal(table.turnedAway, null);
    await until(([, news]) => news === "waiting");
    const why = { code: "RATE_LIMITED", message: "slower" };
    assert.deepEqual(table.turnedAway, why);
    table.listen({ onStatus });
    await at(5);
    assert.equal(table.turnedAway, null);
    const [first, waiting, later, ...rest] = told;
    assert.deepEqual([first, waiting, later], [["connecting", null], ["waiting", why], ["waiting", why]]);
    assert.deepEqual(rest.map(([status]) => status), ["connecting", "connecting", "open", "open"]);
  },
);

playing(
  "what was never sent says why the server let nobody in",
  [
    async (seat) => {
      const { requestId } = await seat.hear("JOIN");
      const payload = { code: "UNAVAILABLE", message: "no store", retry: true };
      await seat.say({ type: "ERROR", payload }, requestId);
      await seat.stay();
    },
  ],
  { timeoutMs: 100 },
  async (table) => {
    const message = /never sent: .*; the server does not let us in: UNAVAILABLE: no store$/;
    await assert.rejects(table.act(ACTION), { name: "TimeoutError", wasSent: false, message });
  },
);

for (const [where, event, words] of [
  ["a browser", {}, "no connection: look at the address"],
  ["Node", { message: "Unexpected server response: 403" }, "no connection (Unexpected server response: 403): look"],
]) {
  test(`what was never sent says that there was no connection, as far as ${where} tells`, async () => {
    class WebSocket {
      constructor() {
        setImmediate(() => {
          this.onerror?.(event);
          this.onclose?.({ code: 1006 });
        });
      }

      close() {}
    }
    const table = room("ws://example.test/", { tableId: "t", terms: QUICK, timeoutMs: 100, WebSocket });
    const isTold = ({ message, wasSent }) => !wasSent && message.includes(words);
    try {
      await assert.rejects(table.act(ACTION), isTold);
    } finally {
      table.close();
    }
  });
}

let tokens = [];
playing(
  "a token is asked for at every connection, and another one is tried",
  [refuses, stays],
  { token: async () => tokens.shift() },
  async (table, server) => {
    tokens = ["new"]; // the first was asked for already, and there was none
    await hearing(table).at(5);
    assert.equal(server.seats.length, 2);
  },
);

playing(
  "a token that cannot be had ends it",
  [stays],
  {
    token: () => {
      throw new Error("none");
    },
  },
  async (table, server) => {
    const { until } = hearing(table);
    const got = await until(([type]) => type === "error");
    assert.match(got.at(-1)[1].message, /there is no connection: none/);
    assert.deepEqual(server.seats, []);
  },
);

// --- acting -------------------------------------------------------------------------------------

playing(
  "an action is answered, and those who click twice get the same",
  [
    async (seat) => {
      await seat.show(5, 5);
      const asked = await seat.hear("ACTION_REQUEST");
      assert.deepEqual(asked.payload, { tableId: "t", ...ACTION });
      assert.equal(asked.clientSeq, 1);
      assert.match(asked.requestId, new RegExp(`^${asked.clientId}-\\d+-[a-z0-9]{6}$`));
      await seat.say(result({ version: 5, reply: { pot: 100 } }), asked.requestId);
      assert.deepEqual(await seat.stay(), []);
    },
  ],
  {},
  async (table) => {
    const first = table.act(ACTION);
    assert.equal(table.act({ amount: 100, actionType: "raise" }), first);
    const { reply, version, cached } = await first;
    assert.deepEqual([reply, version, cached], [{ pot: 100 }, 5, false]);
  },
);

const heard = [];
playing(
  "an action survives cuts, with its id and number",
  [
    async (seat) => {
      await seat.show(5, 5);
      heard.push(await seat.hear("ACTION_REQUEST"));
      await seat.close();
    },
    async (seat) => {
      await seat.letIn({ resumed: true, head: 5 });
      heard.push(await seat.hear("ACTION_REQUEST"));
      await seat.say(result({ version: 5, cached: true, reply: "once" }), heard[1].requestId);
      await seat.stay();
    },
  ],
  {},
  async (table) => {
    const action = { ...ACTION };
    const answer = table.act(action);
    action.amount = 7; // too late
    assert.equal((await answer).reply, "once");
    assert.deepEqual(heard[0], heard[1]);
    assert.equal(heard[0].payload.amount, 100);
  },
);

playing(
  "a refusal is an error with its code, and what was shown is taken back",
  [
    async (seat) => {
      await seat.show(5, { count: 1 });
      const { requestId } = await seat.hear("ACTION_REQUEST");
      await seat.say(result({ version: 5, error: { code: "NOT_YOUR_TURN" } }), requestId);
      await seat.stay();
    },
  ],
  { optimistic: add },
  async (table) => {
    await hearing(table).at(5);
    const answer = table.act({ actionType: "add", by: 2 });
    assert.deepEqual([table.state, table.confirmed, table.pending], [{ count: 3 }, { count: 1 }, 1]);
    await assert.rejects(answer, (error) => {
      assert(error instanceof ActionError);
      assert.deepEqual([error.code, error.detail, error.message], ["NOT_YOUR_TURN", "no", "NOT_YOUR_TURN: no"]);
      return true;
    });
    assert.deepEqual([table.state, table.pending], [{ count: 1 }, 0]);
  },
);

playing(
  "one that is not answered says how to ask again, and a late answer is ignored",
  [
    async (seat) => {
      await seat.show(5, 5);
      const first = await seat.hear("ACTION_REQUEST");
      assert.deepEqual(await seat.hear("ACTION_REQUEST"), first);
      await seat.say(result({ version: 5, reply: "late" }), first.requestId);
      await seat.say(result({ version: 5, reply: "later" }), first.requestId);
      await seat.stay();
    },
  ],
  { timeoutMs: 100 },
  async (table) => {
    await hearing(table).at(5);
    const error = await table.act(ACTION).catch((each) => each);
    assert(error instanceof ActionTimeoutError);
    assert.equal(error.name, "TimeoutError");
    assert(error.wasSent);
    assert.match(error.message, /the outcome is unknown/);
    assert.equal((await table.act(ACTION, { requestId: error.requestId })).reply, "late");
  },
);

playing(
  "a button waits for the state, and not for the reply",
  [
    async (seat) => {
      await seat.show(5, { turn: "ann" });
      const { requestId } = await seat.hear("ACTION_REQUEST");
      await seat.say(result({ version: 6 }), requestId);
      await seat.hear("REQUEST_SNAPSHOT");
      await seat.say(update({ from: 5, to: 6, patch: [[["turn"], "bob"]] }));
      await seat.say(update({ from: 6, to: 7, patch: [[["turn"], "ann"]] }));
      await seat.stay();
    },
  ],
  {},
  async (table) => {
    const fold = button(table, { enabledWhen: ({ turn }) => turn === "ann" });
    assert.equal(fold.isEnabled, false);
    const { at } = hearing(table);
    await at(5);
    assert.equal(fold.isEnabled, true);
    const { press } = fold; // as a page hands it on
    const answer = press({ actionType: "fold" });
    assert.equal(fold.isEnabled, false);
    assert.equal(fold.press({ actionType: "fold" }), null);
    await answer;
    assert.equal(fold.isEnabled, false);
    table.requestSnapshot();
    await at(7);
    assert.equal(fold.isEnabled, true);
  },
);

playing(
  "who acts while being told something is heard",
  [
    async (seat) => {
      await seat.show(5, 5);
      const { requestId } = await seat.hear("ACTION_REQUEST");
      await seat.say(result({ version: 5, reply: "inside" }), requestId);
      await seat.stay();
    },
  ],
  {},
  async (table) => {
    let answer = null;
    table.listen({ onState: () => void (answer ??= table.act(ACTION)) });
    await hearing(table).at(5);
    assert.equal((await answer).reply, "inside");
  },
);

playing(
  "who does not wait for an answer is not told",
  [
    async (seat) => {
      await seat.show(5, 5);
      const { requestId } = await seat.hear("ACTION_REQUEST");
      await seat.say(result({ version: 5, error: { code: "INVALID" } }), requestId);
      await seat.hear("ACTION_REQUEST");
      await seat.stay();
    },
  ],
  {},
  async (table) => {
    const thrown = [];
    const before = process.listeners("unhandledRejection");
    process.removeAllListeners("unhandledRejection");
    process.on("unhandledRejection", (error) => thrown.push(error.message));
    const { at } = hearing(table);
    await at(5);
    table.act(ACTION);
    while (table.pending > 0) await new Promise(setImmediate);
    table.act(ACTION);
    table.close();
    await new Promise(setImmediate);
    process.removeAllListeners("unhandledRejection");
    for (const listener of before) process.on("unhandledRejection", listener);
    assert.deepEqual(thrown, []);
  },
);

playing(
  "who closes while being told something is told nothing more, but that it is closed",
  [
    async (seat) => {
      await seat.show(5, 5);
      await seat.say(update({ from: 5, to: 6, patch: [[[], 6]], events: ["a", "b"] }));
      await seat.stay();
    },
  ],
  {},
  async (table) => {
    table.listen({ onState: ({ version }) => version === 6 && table.close() });
    const { got, until } = hearing(table);
    const answer = assert.rejects(table.act(ACTION), { code: "CLOSED" });
    await until(([, news]) => news === "closed");
    await answer;
    assert.deepEqual([got.at(-2)[0], got.at(-2)[1].version], ["state", 6]);
    assert.deepEqual(got.at(-1), ["status", "closed"]);
  },
);

playing(
  "who listens from within a listener begins with what is told just now, and is told it once",
  [
    async (seat) => {
      await seat.show(5, 5);
      const [six, seven] = [update({ from: 5, to: 6, patch: [[[], 6]] }), update({ from: 6, to: 7, patch: [[[], 7]] })];
      await seat.say(six);
      await seat.say(seven);
      await seat.stay();
    },
  ],
  {},
  async (table) => {
    const got = [];
    let isIn = false;
    const onState = ({ version }) => {
      if (version !== 6 || isIn) return;
      isIn = true;
      table.listen({ onState: (state) => got.push(state.version) });
    };
    table.listen({ onState });
    const { until } = hearing(table);
    await until(([type, news]) => type === "state" && news.version === 7);
    assert.deepEqual(got, [6, 7]);
  },
);

playing("what cannot be said is refused", [stays], {}, async (table) => {
  const circle = { actionType: "a" };
  circle.self = circle;
  await assert.rejects(table.act(circle), TypeError);
  await assert.rejects(table.act({ by: 1 }), TypeError);
  assert.equal(table.pending, 0);
});

// --- what throws that should not ----------------------------------------------------------------

/** Time that is moved by hand; `due` are the calls that were asked for and not called off. */
function handWorld() {
  const due = new Set();
  const world = {
    nowMs: 0,
    trap: () => undefined,
    now: () => (world.trap(), world.nowMs),
    wall: () => world.nowMs,
    chance: () => 0.5,
    later: (ms, call) => {
      const timer = { at: world.nowMs + ms, call };
      due.add(timer);
      return () => due.delete(timer);
    },
  };
  const next = () => {
    const [timer] = due;
    due.delete(timer);
    world.nowMs = timer.at;
    timer.call();
  };
  return { world, due, next };
}

test("a timer whose call throws is set anew, and the table goes on", async () => {
  const { world, due, next } = handWorld();
  const server = play(stays);
  const table = room("ws://example.test/", { tableId: "t", WebSocket: server.WebSocket, world });
  const { at } = hearing(table);
  await at(5);
  world.trap = () => {
    throw new Error("no time");
  };
  assert.throws(next, /no time/);
  assert.equal(due.size, 1);
  assert.throws(next, /no time/);
  assert.equal(due.size, 1);
  world.trap = () => undefined;
  const answer = assert.rejects(table.act(ACTION), { name: "TimeoutError" });
  while (table.pending > 0) next();
  await answer;
  table.close();
  assert.equal(due.size, 0);
});

test("a step that throws is done once, and what follows it is done a second later", async () => {
  const { world, due, next } = handWorld();
  const server = play(stays);
  class Clumsy extends server.WebSocket {
    close(code) {
      super.close(code);
      throw new Error("dropped");
    }
  }
  const table = room("ws://example.test/", { tableId: "t", WebSocket: Clumsy, world });
  const { got, at } = hearing(table);
  await at(5);
  const since = got.length;
  assert.throws(next, /dropped/); // it was silent for too long
  assert.deepEqual(got.slice(since), []);
  assert.deepEqual([...due].map((timer) => timer.at - world.nowMs), [1_000]);
  next();
  assert.deepEqual(got.slice(since).map(([, news]) => news), ["waiting", "connecting"]);
  while (table.status !== "open") await new Promise(setImmediate);
  assert.equal(server.seats.length, 2);
  assert.throws(() => table.close(), /dropped/);
  assert.deepEqual([table.status, due.size], ["closed", 0]);
});

test("a message whose reading throws is the end of nothing", async () => {
  const { world } = handWorld();
  const server = play(stays);
  const table = room("ws://example.test/", { tableId: "t", WebSocket: server.WebSocket, world });
  const { at } = hearing(table);
  await at(5);
  const say = () => server.seats[0].say(update({ from: 5, to: 6, patch: [[[], 6]] }));
  let calls = 0;
  world.trap = () => {
    calls += 1;
    if (calls === 1) throw new Error("no time");
  };
  await assert.rejects(say(), /no time/);
  assert(calls > 1); // it has gone on, nevertheless
  assert.equal(table.version, 5);
  await say();
  await at(6);
  table.close();
});

// --- leaving ------------------------------------------------------------------------------------

test("who leaves leaves nothing behind", { timeout: 20_000 }, async () => {
  const server = play(stays);
  const timers = new Set();
  const world = {
    now: () => performance.now(),
    wall: Date.now,
    chance: Math.random,
    later: (ms, call) => {
      const timer = setTimeout(() => (timers.delete(timer), call()), ms);
      timers.add(timer);
      return () => (timers.delete(timer), clearTimeout(timer));
    },
  };
  const table = room("https://example.test/rooms", { tableId: "t", WebSocket: server.WebSocket, world });
  const { got, at } = hearing(table);
  await at(5);
  const answer = assert.rejects(table.act(ACTION), { code: "CLOSED" });
  assert.equal(timers.size, 1);
  table.close();
  table.close();
  await answer;
  assert.equal(timers.size, 0);
  assert.deepEqual([table.status, server.seats[0].closedWith], ["closed", 1000]);
  assert.deepEqual(got.at(-1), ["status", "closed"]);
  assert.deepEqual(server.urls, ["wss://example.test/rooms"]);
  await assert.rejects(table.act(ACTION), { code: "CLOSED" });
  // Node ends for an error that nobody waits for, and so would this test.
  void table.act(ACTION);
  void table.act(null);
  await new Promise((resolve) => setImmediate(resolve));
});

test("who leaves before the connection is made leaves nothing behind", async () => {
  for (const token of [null, async () => "t"]) {
    const server = play(stays);
    const table = room("ws://example.test/", { tableId: "t", token, WebSocket: server.WebSocket });
    table.close();
    await new Promise(setImmediate);
    assert(server.seats.every(({ isClosed }) => isClosed));
  }
});

// --- settings -----------------------------------------------------------------------------------

const WebSocket = play(stays).WebSocket;
for (const [words, url, options] of [
  [/begins with ws/, "ftp://example.test/", {}],
  [/Invalid URL/, "/rooms", {}],
  [/which table/, "ws://example.test/", { tableId: "" }],
  [/give both/, "ws://example.test/", { clientSeq: 4 }],
  [/timeoutMs: 0/, "ws://example.test/", { timeoutMs: 0 }],
]) {
  test(`a setting that cannot work is refused: ${words}`, () => {
    assert.throws(() => room(url, { tableId: "t", WebSocket, ...options }), words);
  });
}

test("where there is no WebSocket, it says which to install, and how to give it", () => {
  const own = globalThis.WebSocket;
  try {
    delete globalThis.WebSocket;
    assert.throws(() => room("ws://example.test/", { tableId: "t" }), {
      name: "TypeError",
      message: /npm install ws, then import { WebSocket } from "ws"; and room\(url, { tableId, WebSocket }\)/,
    });
  } finally {
    if (own !== undefined) globalThis.WebSocket = own;
  }
});
