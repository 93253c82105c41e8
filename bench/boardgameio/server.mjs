// node server.mjs PORT: boardgame.io as its documentation shows it, with its matches in memory. The
// game is a number that everybody may add to, whoever's turn it is, and whatever version they saw.
import { createRequire } from "node:module";

const require = createRequire(import.meta.url);
const { Server } = require("boardgame.io/server");
const { ActivePlayers } = require("boardgame.io/core");

const add = ({ G, playerID }, note) => {
  G.count += 1;
  G.note = note;
  G.by[playerID] = (G.by[playerID] ?? 0) + 1;
};
const tally = {
  name: "tally",
  setup: () => ({ count: 0, note: "", by: {} }),
  turn: { activePlayers: ActivePlayers.ALL },
  moves: { add: { move: add, client: false, ignoreStaleStateID: true, undoable: false } },
  disableUndo: true,
};

console.info = () => {};
await Server({ games: [tally], origins: ["*"] }).run({ port: Number(process.argv[2]) });
