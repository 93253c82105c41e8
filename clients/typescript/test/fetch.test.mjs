import assert from "node:assert/strict";
import http from "node:http";
import { once } from "node:events";
import test from "node:test";

import { idempotentFetch } from "../dist/index.js";

const RUNNING = { "Content-Type": "application/problem+json", "Retry-After": "2" };
const IN_PROGRESS = JSON.stringify({ type: "urn:semel:problem:in-progress" });
const CONFLICT = JSON.stringify({ type: "urn:semel:problem:key-reused" });

/** A test with a server that answers with these, one after the other: status, body, headers. */
function serving(name, answers, body) {
  test(name, { timeout: 20_000 }, async () => {
    const asked = [];
    const server = http.createServer(async (request, response) => {
      const parts = [];
      for await (const part of request) parts.push(part);
      const { method, url, headers } = request;
      asked.push({ method, url, key: headers["idempotency-key"], body: Buffer.concat(parts).toString() });
      const [status, text = "{}", more = {}] = answers.length > 1 ? answers.shift() : answers[0];
      if (status === "cut") return request.socket.destroy();
      response.writeHead(status === "half" ? 201 : status, {
        "Content-Type": "application/json",
        ...(status === "half" ? { "Content-Length": 100 } : {}),
        ...more,
      });
      if (status === "half") response.write("{", () => request.socket.destroy());
      else response.end(text);
      return undefined;
    });
    server.listen(0, "127.0.0.1");
    await once(server, "listening");
    const slept = [];
    const world = {
      now: () => slept.reduce((sum, ms) => sum + ms, 0),
      chance: () => 0.5,
      sleep: async (ms) => void slept.push(ms),
    };
    try {
      await body({ url: `http://127.0.0.1:${server.address().port}/orders`, asked, slept, world });
    } finally {
      server.closeAllConnections();
      server.close();
    }
  });
}

const POST = { method: "POST", body: '{"item":"book"}' };

serving(
  "a request keeps its key over all its tries, and has it to itself",
  [["cut"], [503], ["half"], [201, '{"id":7}'], [201]],
  async ({ url, asked, slept, world }) => {
    const send = idempotentFetch({ world });
    const response = await send(url, POST);
    assert.deepEqual([response.status, await response.json()], [201, { id: 7 }]);
    await send(url, POST);
    const keys = asked.map(({ key }) => key);
    assert.equal(asked.length, 5);
    assert.match(keys[0], /^"[0-9a-f]{32}"$/);
    assert.deepEqual(new Set(keys.slice(0, 4)).size, 1);
    assert.notEqual(keys[4], keys[0]);
    assert(asked.every(({ body }) => body === POST.body));
    assert.deepEqual(slept, [250, 500, 1000]);
  },
);

serving("a key that the caller has set is kept", [[503], [200]], async ({ url, asked, world }) => {
  await idempotentFetch({ world })(url, { ...POST, headers: { "Idempotency-Key": '"mine"' } });
  assert.deepEqual(
    asked.map(({ key }) => key),
    ['"mine"', '"mine"'],
  );
});

serving("what changes nothing gets no key, and is tried again", [["cut"], [200]], async ({ url, asked, world }) => {
  const response = await idempotentFetch({ world })(url);
  assert.equal(response.status, 200);
  assert.deepEqual(
    asked.map(({ key }) => key),
    [undefined, undefined],
  );
});

serving("without a key nothing is sent twice", [["cut"], [200]], async ({ url, asked, world }) => {
  await assert.rejects(idempotentFetch({ world, methods: [] })(url, POST));
  assert.equal(asked.length, 1);
});

serving("a stream is sent once", [["cut"], [200]], async ({ url, asked, world }) => {
  const body = new Blob(["x"]).stream();
  await assert.rejects(idempotentFetch({ world })(url, { method: "POST", body, duplex: "half" }));
  assert.equal(asked.length, 1);
});

serving("a server's error is an answer", [[500]], async ({ url, asked, world }) => {
  assert.equal((await idempotentFetch({ world })(url, POST)).status, 500);
  assert.equal(asked.length, 1);
});

serving(
  "what is still being worked on is waited for, however often",
  [...Array.from({ length: 9 }, () => [409, IN_PROGRESS, RUNNING]), [201]],
  async ({ url, asked, slept, world }) => {
    assert.equal((await idempotentFetch({ world })(url, POST)).status, 201);
    assert.equal(asked.length, 10);
    assert.deepEqual(new Set(slept), new Set([2000]));
  },
);

serving(
  "a key that was used for something else is an answer",
  [[409, CONFLICT, RUNNING]],
  async ({ url, asked, world }) => {
    const response = await idempotentFetch({ world })(url, POST);
    assert.equal((await response.json()).type, "urn:semel:problem:key-reused");
    assert.equal(asked.length, 1);
  },
);

serving("after the last try the answer is handed on, or the error", [[503]], async ({ url, asked, world }) => {
  assert.equal((await idempotentFetch({ world, tries: 3 })(url, POST)).status, 503);
  assert.equal(asked.length, 3);
  const nobody = () => Promise.reject(new TypeError("fetch failed"));
  await assert.rejects(idempotentFetch({ world, tries: 2, fetch: nobody })(url, POST), /fetch failed/);
});

serving("no try begins when the time is up", [[503, "", { "Retry-After": "20" }]], async ({ url, slept, world }) => {
  assert.equal((await idempotentFetch({ world })(url, POST)).status, 503);
  assert.deepEqual(slept, [20_000, 20_000, 20_000]);
});

serving("who is aborted does not try again", [["cut"]], async ({ url, asked, world }) => {
  const controller = new AbortController();
  const sleep = async () => controller.abort();
  const send = idempotentFetch({ world: { ...world, sleep } });
  await assert.rejects(send(url, { ...POST, signal: controller.signal }), { name: "AbortError" });
  assert.equal(asked.length, 1);
});

serving("who is aborted while it waits is not kept waiting", [[503, "", { "Retry-After": "20" }]], async ({ url, asked }) => {
  const controller = new AbortController();
  const sent = idempotentFetch()(url, { ...POST, signal: controller.signal });
  setTimeout(() => controller.abort(), 50);
  await assert.rejects(sent, { name: "AbortError" });
  assert(asked.length <= 1);
});
