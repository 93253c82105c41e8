// Draws a table as it is seen by one viewer. It knows nothing of connections.

const SUITS = { c: "♣", d: "♦", h: "♥", s: "♠" };
const RANKS = { T: "10" };
const HIDDEN = "??";

const at = (id) => document.getElementById(id);

export const seatOf = (table, user) =>
  user === null ? -1 : table.seats.findIndex((seat) => seat?.user === user);

/** All of it. `sit` is called with the number of a free seat. */
export function draw(table, user, result, sit) {
  at("blinds").textContent = `no limit, ${table.blinds.join(" / ")}`;
  drawFelt(table, result);
  drawSeats(table, user, result, sit);
  drawMine(table, user);
}

function drawFelt(table, result) {
  const pots = table.pots.filter((pot) => pot > 0);
  const bets = table.seats.reduce((sum, seat) => sum + (seat?.bet ?? 0), 0);
  const total = pots.reduce((sum, pot) => sum + pot, 0) + bets;
  at("pot").dataset.pot = total;
  at("pot").replaceChildren(total ? `Pot ${total}` : "");
  if (pots.length > 1) at("pot").append(made("small", ` (${pots.join(" + ")})`));
  const board = [...table.board, ...Array(5 - table.board.length).fill("")];
  fill(at("board"), board, (card) => (card ? cardOf(card, "li") : made("li", "", "empty")));
  at("said").hidden = !result;
  at("said").textContent = result ? told(result) : "";
}

/** Who won, how much, and with what. */
export function told({ pots, shown }) {
  const won = new Map(); // not an object, in which everybody called "constructor" has won already
  for (const pot of pots) {
    for (const [user, amount] of Object.entries(pot.won)) won.set(user, (won.get(user) ?? 0) + amount);
  }
  return [...won]
    .map(([user, amount]) => {
      const says = Object.hasOwn(shown, user) ? shown[user].says : "";
      return `${user} wins ${amount}${says ? `: ${says}` : ""}`;
    })
    .join(", ");
}

// --- what is waited for -------------------------------------------------------------------------

/** In words, and how long at most, if that is known. */
export function drawWait(table, user, leftMs) {
  const [words, left] = at("wait").children;
  const seconds = Math.max(0, Math.ceil(leftMs / 1000));
  const isDeal = table.turn && !isPlaying(table);
  write(words, waitsFor(table, user));
  if (!table.turn) write(left, "");
  else if (isDeal) write(left, seconds ? `in ${seconds} s` : "now");
  else write(left, table.actor && seconds ? `· ${seconds} s` : "");
}

export function waitsFor(table, user) {
  if (isPlaying(table)) {
    if (!table.actor) return ""; // our own click is on its way
    return table.actor === user ? "Your turn" : `Waiting for ${table.actor}`;
  }
  if (table.turn) return table.hand ? "Next hand" : "First hand";
  return table.seats.some(isReady) ? "Waiting for a second player" : "Waiting for two players";
}

/** What somebody at the table should know, or do. */
export function advice(table, user) {
  const seat = table.seats[seatOf(table, user)];
  if (!seat) return table.seats.includes(null) ? "Take a seat." : "All seats are taken: watch until one is free.";
  if (seat.leaving) return "You leave when this hand is over.";
  if (seat.away) return "You sit out until you say that you are back.";
  if (seat.stack === 0 && !(isPlaying(table) && seat.isIn)) return "You have no chips left: buy some to be dealt in.";
  return isPlaying(table) && table.cards.length === 0 ? "You play from the next hand on." : "";
}

const isReady = (seat) => seat && seat.stack > 0 && !seat.away && !seat.leaving;

/** Only what is new: whoever listens to a page would hear it ten times a second. */
function write(item, text) {
  if (item.textContent !== text) item.textContent = text;
}

// --- seats --------------------------------------------------------------------------------------

function drawSeats(table, user, result, sit) {
  const mine = seatOf(table, user);
  const winners = new Set((result?.pots ?? []).flatMap((pot) => Object.keys(pot.won)));
  const list = at("seats");
  while (list.children.length < table.seats.length) list.append(newSeat(list.children.length, sit));
  table.seats.forEach((seat, number) => {
    const item = list.children[number];
    const isEmpty = seat === null;
    item.dataset.place = (number - Math.max(mine, 0) + table.seats.length) % table.seats.length;
    item.dataset.user = seat?.user ?? "";
    item.classList.toggle("me", !isEmpty && number === mine);
    item.classList.toggle("turn", !isEmpty && table.actor === seat.user);
    item.classList.toggle("gone", !isEmpty && isGone(table, seat));
    item.classList.toggle("winner", !isEmpty && winners.has(seat.user));
    item.querySelector(".plate").hidden = isEmpty;
    item.querySelector(".dealer").hidden = isEmpty || table.button !== number;
    item.querySelector(".sit").hidden = !isEmpty || user === null || mine >= 0;
    item.querySelector("b").textContent = seat?.user ?? "";
    item.querySelector(".stack").textContent = seat?.stack ?? "";
    item.querySelector(".stack").dataset.stack = seat?.stack ?? "";
    item.querySelector(".note").textContent = isEmpty ? "" : noteOf(table, seat);
    item.querySelector(".bet").textContent = seat?.bet || "";
    drawHand(item.querySelector(".hand"), seat?.cards ?? [], number === mine ? table.cards : []);
  });
}

/** One's own can be looked at again when they were given up. */
function drawHand(box, cards, own) {
  fill(box, cards.length ? cards : own, (card) => cardOf(card));
  box.classList.toggle("folded", cards.length === 0);
}

function newSeat(number, sit) {
  const item = at("seat").content.firstElementChild.cloneNode(true);
  item.dataset.seat = number;
  item.querySelector(".sit").onclick = () => sit(number);
  return item;
}

const isPlaying = (table) => table.phase === "playing";
const isGone = (table, seat) => seat.away || seat.leaving || (isPlaying(table) && !seat.isIn);

function noteOf(table, seat) {
  if (seat.leaving) return " leaves";
  if (seat.away) return " is away";
  if (isPlaying(table) && seat.isIn && seat.stack === 0) return " all in";
  if (seat.stack === 0) return " no chips";
  return isPlaying(table) && !seat.isIn ? " is out" : "";
}

/** How much of a turn is left, from 1 to 0. */
export function drawClock(table, leftMs, turnMs) {
  for (const item of at("seats").children) {
    const isNext = table?.actor && item.dataset.user === table.actor;
    item.style.setProperty("--left", isNext ? Math.max(0, Math.min(1, leftMs / turnMs)) : 0);
    item.classList.toggle("hurry", Boolean(isNext) && leftMs < turnMs / 4);
  }
}

function drawMine(table, user) {
  const seat = table.seats[seatOf(table, user)];
  fill(at("mine"), table.cards, (card) => cardOf(card));
  at("mine").classList.toggle("folded", isPlaying(table) && !seat?.isIn);
}

// --- cards --------------------------------------------------------------------------------------

function cardOf(card, tag = "span") {
  const item = made(tag, "", "card");
  item.dataset.card = card;
  if (card === HIDDEN) {
    item.classList.add("back");
    return item;
  }
  const [rank, suit] = card;
  item.classList.toggle("red", suit === "h" || suit === "d");
  item.append(RANKS[rank] ?? rank, made("i", SUITS[suit]));
  return item;
}

/** What is there already stays: it would be dealt again before everybody's eyes. */
function fill(box, cards, make) {
  const have = [...box.children].map((child) => child.dataset.card ?? "");
  cards.forEach((card, place) => {
    if (have[place] === card) return;
    if (place < have.length) box.children[place].replaceWith(make(card));
    else box.append(make(card));
  });
  while (box.children.length > cards.length) box.lastElementChild.remove();
}

export function made(tag, text = "", className = "") {
  return Object.assign(document.createElement(tag), { textContent: text, className });
}
