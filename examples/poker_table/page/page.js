// Plays hold'em: asks for a name, sits down, and shows what happens. Who one is belongs to this
// tab, so that another tab may be somebody else.

import { button } from "./client/button.js";
import { room } from "./client/room.js";
import { ActionTimeoutError } from "./client/room_values.js";
import { advice, draw, drawClock, drawWait, made, seatOf } from "./draw.js";
import { guess } from "./guess.js";
import { Wire } from "./wire.js";

const BUY_IN = 2_000;
const TICK_MS = 100;
const TROUBLE_MS = 5_000; // long enough to read it

const at = (id) => document.getElementById(id);
const asked = new URLSearchParams(location.search);
const tableId = asked.get("table") || "main";

let user = null; // who we are; null for those who only watch
let table = null; // the client
let moves = null; // what can be done in one's turn, and once
let seen = null; // how the table stands; also window.seen, for whoever wants to check
let result = null; // of the hand that is over
let trouble = ""; // why the last thing was not done,
let troubleAt = 0; // and since when that is shown

// --- coming in ----------------------------------------------------------------------------------

function start() {
  const kept = (name) => sessionStorage.getItem(`poker:${name}`);
  const isNamed = asked.has("name") || asked.has("watch"); // by a link, which says more than we know
  const name = isNamed ? asked.get("name") : kept("name");
  if (isNamed ? asked.has("watch") : kept("watch")) enter(null);
  else if (name) enter(name);
  else at("enter").hidden = false;
}

function enter(name) {
  user = name;
  at("enter").hidden = true;
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
    onTrouble: ({ message }) => hint(message),
    onError: ended,
  });
}

/** We may not stay, or never came in: with another name we might. */
function ended(error) {
  if (error.code !== "UNAUTHORIZED") {
    at("line").querySelector("span").textContent = `${LINES.failed}: ${error.message}`;
    return;
  }
  sessionStorage.clear();
  for (const each of [document.querySelector("main"), at("kill"), at("out")]) each.hidden = true;
  at("name").value = user ?? "";
  at("refused").textContent = "This name cannot be had: one to twenty letters, digits or signs.";
  at("enter").hidden = false;
}

/** Where this table is, whoever comes. */
const here = () => location.pathname + (asked.has("table") ? `?table=${encodeURIComponent(tableId)}` : "");

// --- showing ------------------------------------------------------------------------------------

function show() {
  if (seen === null) return;
  const { state, version } = seen;
  if (result && (state.phase !== "over" || result.hand !== state.hand)) result = null;
  document.body.dataset.version = version;
  document.body.dataset.hand = state.hand;
  draw(state, user, result, sit);
  drawActs(state);
  drawHint();
  drawTitle(state);
  tick();
}

/** Which of the tabs it is, and whether it is wanted. */
function drawTitle(state) {
  const isTurn = user !== null && state.actor === user;
  document.title = `${isTurn ? "Your turn: " : ""}${user ?? "Watching"} · Hold'em`;
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
  document.body.dataset.status = at("line").dataset.status = status;
  at("line").dataset.server = Wire.server ?? "";
  const why = table.turnedAway === null ? "" : `: ${table.turnedAway.message || table.turnedAway.code}`;
  at("line").querySelector("span").textContent = LINES[status] + why + server;
  at("kill").disabled = status !== "open";
  drawHint();
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

function hint(words) {
  trouble = words;
  troubleAt = Date.now();
  drawHint();
}

function drawHint() {
  if (seen === null) return;
  const isHeld = seen.pending > 0 && table.status !== "open";
  const words = isHeld ? "It is sent as soon as there is a connection." : advice(seen.state, user);
  at("hint").textContent = trouble || words;
  at("hint").classList.toggle("bad", trouble !== "");
}

function tick() {
  if (seen === null) return;
  if (trouble && Date.now() > troubleAt + TROUBLE_MS) hint("");
  const { state } = seen;
  const leftMs = (state.until ?? 0) - Wire.now();
  drawClock(state, leftMs, state.turnMs);
  drawWait(state, user, leftMs);
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
    hint(sorry(error));
  }
}

function sorry(error) {
  if (!(error instanceof ActionTimeoutError)) return error.detail || error.message;
  return error.wasSent
    ? "There was no answer. The table will show what became of it."
    : "There was no connection, and nothing was done. Try again.";
}

const sit = (seat) => act("sit", { seat, buyIn: BUY_IN });

function drawActs(state) {
  const seat = state.seats[seatOf(state, user)];
  const { call = 0, raise = null } = state.can ?? {};
  const isTurn = moves.isEnabled;
  at("acts").hidden = user === null;
  at("acts").classList.toggle("seatless", !seat);
  const highest = Math.max(0, ...state.seats.map((each) => each?.bet ?? 0));
  at("fold").disabled = !isTurn || call === 0;
  at("call").disabled = !isTurn;
  at("call").textContent = isTurn && call ? `Call ${call}` : "Check";
  at("raise").disabled = !isTurn || raise === null;
  at("raise").dataset.kind = highest ? "raise" : "bet";
  for (const each of document.querySelectorAll(".amount *")) each.disabled = at("raise").disabled;
  if (isTurn && raise) drawAmount(state, raise);
  else at("raise").textContent = highest ? "Raise" : "Bet";
  drawMore(state, seat);
}

function drawAmount(state, [least, most]) {
  const slider = at("amount");
  if (slider.dataset.turn !== state.turn) {
    Object.assign(slider, { min: least, max: most, value: least });
    Object.assign(at("exact"), { min: least, max: most, value: least });
    slider.dataset.turn = state.turn;
  }
  drawRaise();
}

/** The slider keeps to what is possible; what is typed may not, before one has finished. */
function choose(amount) {
  at("amount").value = amount;
  at("exact").value = at("amount").value;
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

at("amount").oninput = () => choose(at("amount").value);
at("exact").oninput = () => {
  const typed = at("exact").valueAsNumber; // a slider that is told nothing goes to the middle
  at("amount").value = Number.isNaN(typed) ? at("amount").min : typed;
  drawRaise();
};
at("exact").onchange = () => choose(at("amount").value);
at("exact").onfocus = () => at("exact").select();
for (const each of document.querySelectorAll("[data-part]")) {
  each.onclick = () => {
    const highest = Math.max(...seen.state.seats.map((seat) => seat?.bet ?? 0));
    const pot = Number(at("pot").dataset.pot);
    const more = PARTS[each.dataset.part](at("amount"), pot, seen.state.can.call);
    const isSpan = ["min", "max"].includes(each.dataset.part);
    choose(isSpan ? more : Math.round(highest + more));
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
at("acts").onsubmit = (event) => event.preventDefault(); // Enter in the amount is no click

at("enter").onsubmit = (event) => {
  event.preventDefault();
  const name = at("name").value.trim();
  sessionStorage.setItem("poker:name", name);
  history.replaceState(null, "", here()); // loaded again, we are who we are now
  enter(name);
};
at("watch").onclick = () => {
  sessionStorage.setItem("poker:watch", "1");
  history.replaceState(null, "", here());
  enter(null);
};
at("out").onclick = () => {
  sessionStorage.clear();
  location.href = here();
};

setInterval(tick, TICK_MS);
start();
