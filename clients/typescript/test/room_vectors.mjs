/**
 * Runs a guest through `clients/vectors/room`; the README there says what the words mean.
 *
 * tests/support/room_vectors.py is the same for the other client.
 */

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";

import { Guest } from "../dist/room_rules.js";
import { ActionError, ActionTimeoutError, ROOM_TERMS, RoomError } from "../dist/room_values.js";
import { cursorOf } from "./vectors.mjs";

const FOLDER = new URL("../../vectors/room/", import.meta.url);
export const TABLE = "t";

/** By name, all of them. */
export function roomFiles() {
  return readdirSync(FOLDER).map((file) => file.replace(/\.json$/, ""));
}

export function roomCases(name) {
  return JSON.parse(readFileSync(new URL(`${name}.json`, FOLDER), "utf8"));
}

// --- messages -----------------------------------------------------------------------------------

function versionOf(place) {
  return Number(String(place).split(".")[0]);
}

function message(type, payload) {
  return { type, payload: { tableId: TABLE, ...payload } };
}

function at(place) {
  return { stateVersion: versionOf(place), position: cursorOf(place) };
}

export function joined({
  resumed = false,
  head = 0,
  viewer = null,
  heartbeat_ms = 15_000,
  message_bytes: messageBytes,
}) {
  const told = { viewer, head: cursorOf(head), stateVersion: versionOf(head), serverTime: 1 };
  return message("JOINED", { ...told, heartbeatMs: heartbeat_ms, resumed, messageBytes });
}

export function snapshot({ version, state, reason = "join", viewer = null }) {
  return message("TABLE_SNAPSHOT", { ...at(version), state, viewer, reason });
}

export function update({ from, to, patch, events = [] }) {
  const before = { previousVersion: versionOf(from), previous: cursorOf(from) };
  return message("TABLE_STATE_UPDATE", { ...at(to), ...before, patch, events });
}

export function result({ version, cached = false, error, reply = null, action = null }) {
  const ending =
    error === undefined
      ? { success: true, reply }
      : { success: false, error: { message: "no", ...error } };
  return message("ACTION_RESULT", { stateVersion: version, cached, action, ...ending });
}

export function heartbeat(head) {
  return { type: "HEARTBEAT", payload: { serverTime: 1, heads: { [TABLE]: cursorOf(head) } } };
}

export function handResult({ version, result: came }) {
  return message("HAND_RESULT", { ...at(version), result: came });
}

const ANSWERS = { joined, snapshot, update, result, hand_result: handResult };

// --- what a user brings -------------------------------------------------------------------------

/** What `optimistic: add` means: it fits a state with a count. */
export function add(state, action) {
  if (typeof state?.count !== "number") throw new TypeError("no count");
  state.count += action.by; // changing what is given changes nothing else
  return state;
}

// --- walking ------------------------------------------------------------------------------------

/** A guest, a clock that stands still unless told, and what has been seen. */
export class Walk {
  now = 1_000_000;
  made = 0;
  ids = new Map();
  seen = [];
  became = [];
  isOpening = false;
  isOver = false;
  withinMs = 0;
  words = ""; // of why a request was never sent

  constructor(options, chance) {
    const { at: from, state, viewer = null, message_bytes, ...others } = options;
    const { enabled_when = {}, optimistic, buffered = 256, pending = 1_000, ...rest } = others;
    this.chance = chance;
    this.enabledWhen = enabled_when;
    this.guest = new Guest({
      tableId: TABLE,
      terms: { ...ROOM_TERMS, buffered, pending },
      chance: () => chance,
      letters: () => this.letters(),
      wall: () => this.now,
      clientId: "c",
      optimistic: { add }[optimistic] ?? null,
      ...rest,
    });
    this.advance();
    if (from === undefined) return;
    this.take({ connect: null });
    this.take({ joined: { head: from, viewer, message_bytes } });
    this.take({ snapshot: { version: from, state, viewer } });
    this.seen = [];
    this.became = [];
  }

  letters() {
    this.made += 1;
    const letters = String(this.made).padStart(6, "0");
    this.ids.set(this.made, `c-${Math.floor(this.now)}-${letters}`);
    return letters;
  }

  /** Do all that can be done without the world. */
  advance() {
    for (;;) {
      const step = this.guest.next(this.now);
      if (step.step === "wait") {
        this.withinMs = step.withinMs;
        return;
      }
      if (step.step === "over") {
        if (!this.isOver) this.seen.push({ over: step.error?.code ?? null });
        this.isOver = true;
        return;
      }
      if (step.step === "open") this.isOpening = true;
      else if (step.step === "deliver" && step.news.type === "became") this.became.push(turned(step.news));
      else this.seen.push(this.said(step));
      if (step.step === "hang up") this.isOpening = false;
    }
  }

  /** A step is its name and what is told, and what else there is besides. */
  take(step) {
    const [[name, told], ...rest] = Object.entries(step);
    const besides = Object.fromEntries(rest);
    const act = ANSWERS[name] ? null : this[`on_${name}`];
    assert(act !== undefined, `an unknown step: ${name}`);
    if (act === null) this.receive(ANSWERS[name](told), besides);
    else act.call(this, told, besides);
    this.advance();
  }

  idOf(number) {
    return this.ids.get(number) ?? number;
  }

  receive(said, { id } = {}) {
    const answer = id === undefined ? said : { ...said, requestId: this.idOf(id) };
    this.guest.received(this.now, JSON.stringify(answer));
  }

  on_connect(token) {
    while (!this.isOpening) this.on_pass_ms(this.withinMs);
    this.isOpening = false;
    this.guest.opened(this.now, token);
  }

  on_heartbeat(head) {
    this.receive(heartbeat(head));
  }

  on_message(said, besides) {
    this.receive(said, besides);
  }

  on_text(text) {
    this.guest.received(this.now, text);
  }

  on_close(code, { reason = "" }) {
    this.isOpening = false;
    this.guest.closed(this.now, code, reason);
  }

  on_pass_ms(told) {
    const until = this.now + this.span(told);
    while (this.now + this.withinMs <= until && !this.isOver) {
      this.now += this.withinMs;
      this.advance();
    }
    this.now = until;
  }

  /** A number, or the shortest and the longest that chance may make of it. */
  span(told) {
    if (!Array.isArray(told)) return told;
    const [least, most] = told;
    return least + this.chance * (most - least);
  }

  on_act(action, { request, guard, request_id }) {
    const requestId = request_id === undefined ? null : this.idOf(request_id);
    const options = guard === undefined ? { requestId } : { requestId, guard };
    assert.equal(this.guest.act(this.now, action, options), this.idOf(request));
  }

  on_manual() {
    this.guest.requestSnapshot(this.now);
  }

  on_stop() {
    this.guest.stop();
  }

  // --- looking ----------------------------------------------------------------------------------

  on_expect(wanted) {
    const seen = this.seen.splice(0);
    const meant = wanted.map((each) =>
      each.hang_up ? { ...each, after_ms: Math.round(this.span(each.after_ms)) } : each,
    );
    assert.deepEqual(seen, meant);
  }

  on_statuses(wanted) {
    assert.deepEqual(this.became.splice(0), wanted);
  }

  on_opening(wanted) {
    assert.equal(this.isOpening, wanted);
  }

  on_words(wanted) {
    assert.equal(this.words.replace(/^; /, ""), wanted);
  }

  on_button(wanted) {
    const { isSettled, confirmed } = this.guest;
    const isTheirs = ([name, found]) => confirmed?.[name] === found;
    assert.equal(isSettled && Object.entries(this.enabledWhen).every(isTheirs), wanted);
  }

  on_ids(wanted) {
    assert.deepEqual(Object.fromEntries(this.ids), wanted);
  }

  on_is(wanted) {
    for (const [name, found] of Object.entries(wanted)) {
      assert.deepEqual(this.guest[name], name === "cursor" ? cursorOf(found) : found, name);
    }
  }

  /** Which of the ids that were made it is. */
  number(id) {
    for (const [number, made] of this.ids) if (made === id) return number;
    return id;
  }

  said(step) {
    switch (step.step) {
      case "send":
        return this.sent(step.message);
      case "deliver":
        return told(step.news);
      case "settle":
        this.words = String(step.answer.message ?? "").split("nothing was changed by it")[1] ?? "";
        return { ...settled(step.answer), id: this.number(step.requestId) };
      case "hang up":
        return { hang_up: step.why, after_ms: Math.round(step.afterMs) };
      default:
        throw new Error(`an unknown step: ${step.step}`);
    }
  }

  sent({ type, requestId, clientId, clientSeq, payload, ...rest }) {
    const { tableId, ...told } = payload;
    assert.equal(tableId, TABLE);
    assert.deepEqual(rest, {});
    const isUsual = told.cursor === cursorOf(versionOf(told.cursor));
    if (isUsual) told.cursor = versionOf(told.cursor);
    const said = { send: type, id: this.number(requestId), ...told };
    if (clientSeq === undefined) return said;
    assert.equal(clientId, "c");
    return { ...said, seq: clientSeq };
  }
}

function told(news) {
  switch (news.type) {
    case "state": {
      const { state, confirmed, version, viewer, pending } = news.state;
      const found = { state, version };
      if (JSON.stringify(confirmed) !== JSON.stringify(state)) found.confirmed = confirmed;
      if (viewer !== null) found.viewer = viewer;
      return pending > 0 ? { ...found, pending } : found;
    }
    case "event":
      return { event: news.event.data, version: news.event.version };
    case "result":
      return { result: news.result.result, version: news.result.version };
    case "presence":
      return { presence: news.presence.users, spectators: news.presence.spectators };
    default:
      return { trouble: news.code };
  }
}

function turned({ status, turnedAway }) {
  return turnedAway === null ? status : { [status]: turnedAway.code, message: turnedAway.message };
}

function settled(answer) {
  if (answer instanceof ActionTimeoutError) {
    assert(answer.message.includes(answer.requestId) || !answer.wasSent);
    return { unanswered: answer.wasSent ? "sent" : "never sent" };
  }
  if (answer instanceof ActionError) {
    return { refused: answer.code, ...(answer.wasSent ? {} : { never_sent: true }) };
  }
  if (answer instanceof RoomError) return { ended: answer.code };
  const found = { done: answer.reply, version: answer.version };
  return answer.cached ? { ...found, cached: true } : found;
}
