// Plays hold'em: asks for a name, sits down, and shows what happens. Who one is belongs to this
// tab, so that another tab may be somebody else.

import { button } from "./client/button.js";
import { room } from "./client/room.js";
import { draw, drawClock, made, seatOf } from "./draw.js";
import { guess } from "./guess.js";
import { Wire } from "./wire.js";

const BUY_IN = 2_000;
const TICK_MS = 100;

const at = (id) => document.getElementById(id);
const asked = new URLSearchParams(location.search);
const tableId = asked.get("table") ?? "main";

let user = null; // who we are; null for those who only watch
let table = null; // the client
let moves = null; // what can be done in one's turn, and once
let seen = null; // how the table stands; also window.seen, for whoever wants to check
let result = null; // of the hand that is over

// --- coming in ----------------------------------------------------------------------------------

function start() {
  const name = asked.get("name") ?? sessionStorage.getItem("poker:name");
  if (asked.has("watch") || sessionStorage.getItem("poker:watch")) enter(null);
  else if (name) enter(name);
  else at("enter").hidden = false;
}

function enter(name) {
  user = name;
  at("enter").hidden = true;
  at("acts").hidden = user === null;
  at("out").textContent = user === null ? "Stop watching" : `I am not ${user}`;
  for (const each of [document.querySelector("main"), at("kill"), at("out")]) each.hidden = false;
  table = room("/rooms", {
    tableId,
    token: user,
    spectate: user === null,
    optimistic: (state, action) => guess(state, action, user),
    WebSocket: Wire,
  });
  moves = button(table, { enabledWhen: (state) => user !== null && state?.actor === user });
  table.listen({
    onState: (state) => ((seen = window.seen = state), show()),
    onEvent: ({ data }) => tell(data),
    onResult: (told) => ((result = told.result), show()),
    onPresence: ({ users, spectators }) => drawHere(users, spectators),
    onStatus: line,
    onTrouble: ({ message }) => hint(message, true),
    onError: (error) => hint(error.message, true),
  });
}

// --- showing ------------------------------------------------------------------------------------

function show() {
  if (seen === null) return;
  const { state, version } = seen;
  if (result && (state.phase !== "over" || result.hand !== state.hand)) result = null;
  document.body.dataset.version = version;
  document.body.dataset.hand = state.hand;
  draw(state, user, result, sit);
  drawActs(state);
}

const LINES = {
  connecting: "connecting",
  open: "connected",
  waiting: "not connected; trying again",
  closed: "closed",
  failed: "not connected any more",
};

function line(status = table.status) {
  const server = status === "open" && Wire.server ? ` to ${Wire.server}` : "";
  at("line").dataset.status = status;
  at("line").dataset.server = Wire.server ?? "";
  at("line").querySelector("span").textContent = LINES[status] + server;
  at("kill").disabled = status !== "open";
}
Wire.onServer = () => line();

function drawHere(users, spectators) {
  at("here").replaceChildren(made("b", users.join(", ") || "nobody"));
  if (spectators) at("here").append(`, and ${spectators} watching`);
}

const STORIES = {
  sat: ({ amount }) => `sits down with ${amount}`,
  bought: ({ amount }) => `buys ${amount}`,
  leaving: () => "leaves after this hand",
  left: ({ amount }) => `leaves with ${amount}`,
  away: () => "is away",
  back: () => "is back",
  late: () => "took too long",
  dealt: ({ hand }) => `deals hand ${hand}`,
  blind: ({ amount }) => `posts ${amount}`,
  folded: () => "folds",
  checked: () => "checks",
  called: ({ amount }) => `calls ${amount}`,
  bet: ({ amount }) => `bets ${amount}`,
  raised: ({ amount }) => `raises to ${amount}`,
  shown: ({ cards }) => `shows ${cards.join(" ")}`,
  mucked: () => "does not show",
  won: ({ amount }) => `wins ${amount}`,
};

function tell(event) {
  const item = made("li");
  item.dataset.event = event.event;
  if (event.event === "board") item.append(`On the board: ${event.cards.join(" ")}`);
  else if (event.event === "cards") item.append(`You have ${event.cards.join(" ")}`);
  else item.append(made("b", event.user), ` ${STORIES[event.event](event)}`);
  at("story").append(item);
  at("story").scrollTop = at("story").scrollHeight;
}

function hint(words, isBad = false) {
  at("hint").textContent = words;
  at("hint").classList.toggle("bad", isBad);
}

function tick() {
  if (seen?.state.until) drawClock(seen.state, seen.state.until - Wire.now(), seen.state.turnMs);
}

// --- doing --------------------------------------------------------------------------------------

async function act(actionType, more = {}) {
  await heard(table.act({ actionType, ...more }));
}

/** In one's turn, which is named: a click that comes too late is not taken for the next one. */
async function move(actionType, more = {}) {
  await heard(moves.press({ actionType, turn: seen.confirmed.turn, ...more }));
}

async function heard(answer) {
  hint("");
  try {
    await answer;
  } catch (error) {
    hint(error.detail || error.message, true);
  }
}

const sit = (seat) => act("sit", { seat, buyIn: BUY_IN });

function drawActs(state) {
  const seat = state.seats[seatOf(state, user)];
  const { call = 0, raise = null } = state.can ?? {};
  const isTurn = moves.isEnabled;
  at("acts").classList.toggle("seatless", !seat);
  const highest = Math.max(0, ...state.seats.map((each) => each?.bet ?? 0));
  at("fold").disabled = !isTurn || call === 0;
  at("call").disabled = !isTurn;
  at("call").textContent = isTurn && call ? `Call ${call}` : "Check";
  at("raise").disabled = !isTurn || raise === null;
  at("raise").dataset.kind = highest ? "raise" : "bet";
  for (const each of document.querySelectorAll(".amount *")) each.disabled = at("raise").disabled;
  if (isTurn && raise) drawAmount(state, raise);
  drawMore(state, seat);
}

function drawAmount(state, [least, most]) {
  const slider = at("amount");
  if (slider.dataset.turn !== state.turn) {
    Object.assign(slider, { min: least, max: most, value: least });
    slider.dataset.turn = state.turn;
  }
  drawRaise();
}

function drawRaise() {
  const { value, max } = at("amount");
  const word = at("raise").dataset.kind === "raise" ? "Raise to" : "Bet";
  at("raise").textContent = value === max ? `All in, ${value}` : `${word} ${value}`;
}

function drawMore(state, seat) {
  const isPlaying = state.phase === "playing";
  const shown = {
    deal: Boolean(seat) && !isPlaying && Boolean(state.turn),
    buy: Boolean(seat) && seat.stack === 0 && !(isPlaying && seat.isIn),
    back: Boolean(seat) && (seat.away || seat.leaving),
    away: Boolean(seat) && !seat.away,
    leave: Boolean(seat) && !seat.leaving,
  };
  for (const [name, isShown] of Object.entries(shown)) {
    document.querySelector(`.more [data-act=${name}]`).hidden = !isShown;
  }
}

const PARTS = {
  min: ({ min }) => min,
  half: (_, pot, call) => (pot + call) / 2,
  pot: (_, pot, call) => pot + call,
  max: ({ max }) => max,
};

at("amount").oninput = drawRaise;
for (const each of document.querySelectorAll("[data-part]")) {
  each.onclick = () => {
    const highest = Math.max(...seen.state.seats.map((seat) => seat?.bet ?? 0));
    const pot = Number(at("pot").dataset.pot);
    const more = PARTS[each.dataset.part](at("amount"), pot, seen.state.can.call);
    const isSpan = ["min", "max"].includes(each.dataset.part);
    at("amount").value = isSpan ? more : Math.round(highest + more);
    drawRaise();
  };
}

at("fold").onclick = () => move("fold");
at("call").onclick = () => move(seen.confirmed.can?.call ? "call" : "check");
at("raise").onclick = () => move(at("raise").dataset.kind, { amount: Number(at("amount").value) });
for (const name of ["deal", "back", "away", "leave"]) {
  document.querySelector(`.more [data-act=${name}]`).onclick = () => act(name);
}
document.querySelector(".more [data-act=buy]").onclick = () => act("buy", { amount: BUY_IN });
at("kill").onclick = () => Wire.kill();

at("enter").onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem("poker:name", at("name").value);
  enter(at("name").value);
};
at("watch").onclick = () => {
  sessionStorage.setItem("poker:watch", "1");
  enter(null);
};
at("out").onclick = () => {
  sessionStorage.clear();
  location.href = location.pathname + (asked.has("table") ? `?table=${tableId}` : "");
};

setInterval(tick, TICK_MS);
start();
