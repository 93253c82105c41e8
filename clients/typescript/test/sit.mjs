// node sit.mjs URL USER COUNT GOAL: add COUNT times, each once, and print how the table stands when
// everybody has: at version GOAL.

import { ActionTimeoutError, room } from "../dist/index.js";

const [url, user, count, goal] = process.argv.slice(2);
const terms = { backoffMs: 20, longestMs: 200, resyncMs: 1_000, graceMs: 300 };
const table = room(url, { tableId: "t1", token: user, terms, timeoutMs: 2_000 });
const versions = [];
const events = [];

async function acted(action, options) {
  try {
    return await table.act(action, options);
  } catch (error) {
    if (!(error instanceof ActionTimeoutError)) throw error;
    return await acted(action, { requestId: error.requestId });
  }
}

const atGoal = new Promise((resolve) => {
  table.listen({
    onState: ({ version }) => {
      versions.push(version);
      if (version === Number(goal)) resolve();
    },
    onEvent: ({ data }) => events.push(data),
  });
});
for (let n = 1; n <= Number(count); n++) await acted({ actionType: "add", n });
await atGoal;
console.log(JSON.stringify({ state: table.confirmed, cursor: table.cursor, versions, events }));
table.close();
