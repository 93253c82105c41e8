/**
 * A server of one table that does what it is told, without a network: a class that stands in for
 * `WebSocket`, and parts that are played on the other side of it.
 *
 * Each connection plays the next part; the last part is played for all that follow.
 */

import assert from "node:assert/strict";

import { joined, snapshot } from "./room_vectors.mjs";

export function play(...parts) {
  const left = [...parts];
  const server = { seats: [], errors: [], urls: [] };
  server.WebSocket = class {
    onopen = null;
    onmessage = null;
    onclose = null;
    onerror = null;

    constructor(url) {
      server.urls.push(url);
      this.seat = new Seat(this);
      server.seats.push(this.seat);
      const part = left.length > 1 ? left.shift() : left[0];
      setImmediate(() => {
        if (this.seat.isClosed) return;
        this.onopen?.({});
        part(this.seat).catch((error) => error === GONE || server.errors.push(error));
      });
    }

    send(text) {
      assert(!this.seat.isClosed, "said to nobody");
      this.seat.take(JSON.parse(text));
    }

    close(code) {
      this.seat.end(code);
    }
  };
  return server;
}

const GONE = new Error("the client has hung up");

/** One connection, from the server's side. */
class Seat {
  isClosed = false;
  closedWith = null;
  #heard = [];
  #waiting = null;

  constructor(socket) {
    this.socket = socket;
  }

  take(message) {
    this.#heard.push(message);
    this.#waiting?.resolve();
  }

  end(code) {
    if (this.isClosed) return;
    this.isClosed = true;
    this.closedWith = code;
    this.#waiting?.reject(GONE);
  }

  /** As it comes from a network: not while anybody is at work. */
  async say(message, requestId) {
    await new Promise(setImmediate);
    if (this.isClosed) throw GONE;
    const said = requestId === undefined ? message : { ...message, requestId };
    this.socket.onmessage?.({ data: typeof said === "string" ? said : JSON.stringify(said) });
  }

  async hear(type) {
    while (this.#heard.length === 0) {
      if (this.isClosed) throw GONE;
      await new Promise((resolve, reject) => (this.#waiting = { resolve, reject }));
    }
    const message = this.#heard.shift();
    assert.equal(message.type, type);
    return message;
  }

  /** Answer a join; the join. */
  async letIn(told) {
    const join = await this.hear("JOIN");
    await this.say(joined(told), join.requestId);
    return join;
  }

  /** Answer a join with a snapshot; the join. */
  async show(version, state, told = {}) {
    const join = await this.letIn({ head: version, viewer: told.viewer ?? null });
    await this.say(snapshot({ version, state, ...told }));
    return join;
  }

  async close(code = 1006) {
    await new Promise(setImmediate);
    if (this.isClosed) throw GONE;
    this.isClosed = true;
    this.socket.onerror?.({});
    this.socket.onclose?.({ code });
  }

  /** Until the client hangs up; what it says meanwhile. */
  async stay() {
    try {
      for (;;) await new Promise((resolve, reject) => (this.#waiting = { resolve, reject }));
    } catch (error) {
      if (error !== GONE) throw error;
      return this.#heard.splice(0);
    }
  }
}
