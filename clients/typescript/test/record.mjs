// node record.mjs URL: follow a feed to its end, without waiting, and print what came.

import { feed } from "../dist/index.js";
import { shown } from "./vectors.mjs";

const world = {
  now: () => performance.now(),
  chance: Math.random,
  sleep: () => new Promise(setImmediate),
};
const got = [];
for await (const event of feed(process.argv[2], { world })) {
  got.push(event.type === "update" ? [event.id, event.data] : shown(event));
}
console.log(JSON.stringify(got));
