/** Takes a guest along the walks that come in, with the least chance: `node room_walks.mjs < cases.json`. */

import { readFileSync } from "node:fs";

import { Walk } from "./room_vectors.mjs";

const cases = JSON.parse(readFileSync(0, "utf8"));
for (const [number, { options, steps }] of cases.entries()) {
  const walk = new Walk(options, 0);
  for (const [at, step] of steps.entries()) {
    try {
      walk.take(step);
    } catch (error) {
      console.log(`walk ${number}, step ${at}: ${JSON.stringify(step)}\n${error.message}`);
      process.exit(1);
    }
  }
}
console.log(cases.length);
